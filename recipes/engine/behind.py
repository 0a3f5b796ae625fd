"""Numbers that a device computes are read when they are there, while it is busy with the next step."""

import torch


class Behind:
    """The numbers of a tensor, on their way to the CPU: only who reads them waits."""

    def __init__(self, tensor: torch.Tensor):
        self.there, self.copied = tensor.to("cpu", non_blocking=True), None
        if tensor.device.type == "cuda":
            self.copied = torch.cuda.Event()
            self.copied.record()

    def read(self) -> list[float]:
        if self.copied is not None:
            self.copied.synchronize()
        return self.there.tolist()
