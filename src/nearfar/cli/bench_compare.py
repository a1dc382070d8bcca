"""nearfar bench compare"""
