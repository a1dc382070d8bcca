"""nearfar embed"""
