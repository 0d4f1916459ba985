"""The same steps on several processes, which ``torch.distributed`` connects."""

from .processes import connect
from .shards import shard
from .svi import DistributedSVI
from .wrap import wrap

__all__ = ["DistributedSVI", "connect", "shard", "wrap"]
