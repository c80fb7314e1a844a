"""The shared kernels: one public function each, whatever the hardware."""
