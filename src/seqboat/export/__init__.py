"""Models outside this package: ONNX files and int8 weights."""
