"""Reading the numbers of a step while the GPU already computes the next one."""

import torch


class Behind:
    """Copies the numbers of a tensor to the CPU without waiting for the GPU; `read` waits. Devices other than CUDA do
    not report when a copy is done, so there the constructor waits."""

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
