"""Define the small fused operators of a layer. Each file has a public function, its reference and its kernels."""
