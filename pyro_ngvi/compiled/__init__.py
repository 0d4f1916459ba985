"""Steps of SVI as graphs of tensor operations, without the Python around them."""

from .svi import CompiledSVI, compile

__all__ = ["CompiledSVI", "compile"]
