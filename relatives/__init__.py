"""The relatives of EDiT and DiLoCo, one file each; methods.py names them all."""
