"""Small fused operators of a layer, one file each: the public function, its reference, its kernels."""
