"""Models as ONNX graphs, for runtimes without Python or PyTorch; `seqboat export-onnx` writes them."""
