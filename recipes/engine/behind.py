"""Numbers that a device computes are read when they are there, while it is busy with the next step."""

import torch


class Behind:
    """The numbers of a tensor, on their way to the CPU: only who reads them waits. Beside CUDA nothing tells when they
    are there, and they are waited for at once."""

    def __init__(self, tensor: torch.Tensor):
        on_cuda = tensor.device.type == "cuda"
        self.there, self.copied = tensor.to("cpu", non_blocking=on_cuda), None
        if on_cuda:
            self.copied = torch.cuda.Event()
            self.copied.record()

    def read(self) -> list[float]:
        if self.copied is not None:
            self.copied.synchronize()
        return self.there.tolist()
