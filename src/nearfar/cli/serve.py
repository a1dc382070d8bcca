"""nearfar serve"""
