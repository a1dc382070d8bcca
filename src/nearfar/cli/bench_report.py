"""nearfar bench report"""
