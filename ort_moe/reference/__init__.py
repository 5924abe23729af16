"""What every op computes, in NumPy: a float32 emulation with the kernels' bits, and a plain float64 reference."""
