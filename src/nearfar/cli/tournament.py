"""nearfar tournament"""
