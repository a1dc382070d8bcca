"""nearfar index"""
