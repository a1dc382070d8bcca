"""nearfar search"""
