"""nearfar tune"""
