"""What is installed: ONNX Runtime, and the native library with our ops."""
