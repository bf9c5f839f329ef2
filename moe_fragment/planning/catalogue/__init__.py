"""What is known about hardware and models, as data: every row says where it is from and when it was collected."""

from moe_fragment.planning.catalogue.accelerators import Accelerator, accelerators
from moe_fragment.planning.catalogue.models import PublicModel, models

__all__ = ["Accelerator", "PublicModel", "accelerators", "models"]
