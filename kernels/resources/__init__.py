"""Resources that computing shares in a process: torch's threads and default device, memory of large
results, kernels compiled.
"""
