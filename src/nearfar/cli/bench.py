"""nearfar bench"""
