"""Lets a torchvision that was built for CUDA import beside a torch that was not: its compiled library cannot be loaded,
so the two operators that it registers Python code for are declared here, without kernels. Nothing calls them."""

import importlib.abc
import sys


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Waits for the first import of torchvision, so that processes without torch stay quick."""

    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            DeclareOperators.library = torch.library.Library("torchvision", "DEF")  # lives as long as this object
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, DeclareOperators())
