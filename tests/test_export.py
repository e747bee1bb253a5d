"""Deployment: a converted network, folded or not, leaves torch in every way that torch offers."""

import inspect
import io
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from balnorm import BalNormLayer, convert, fold
from cases import digits_network, small_network

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def trained(model, x):
    for _ in range(3):
        model(x)
    return model.eval()


def residual_network(**options):
    """A small post-activation network, converted."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

        def forward(self, x):
            return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))

    layers = [nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Block(), nn.Flatten(2)]
    return convert(nn.Sequential(*layers), **options)[0]


needs_dynamic_shapes = pytest.mark.skipif(
    "dynamic_shapes" not in inspect.signature(torch.onnx.export).parameters,
    reason="this torch.onnx.export has no dynamic_shapes",
)


def run_onnx(model, x, *, others):
    """The outputs of an exported model for inputs of several batch sizes."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        batch = torch.export.Dim("batch", min=1)
        torch.onnx.export(
            model, (x,), buffer, input_names=["x"], dynamic_shapes=({0: batch},), dynamo=True, verbose=False
        )
    session = onnxruntime.InferenceSession(buffer.getvalue())
    return [torch.from_numpy(session.run(None, {"x": example.numpy()})[0]) for example in [x, *others]]


@needs_dynamic_shapes
@pytest.mark.slow
@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize(("mass", "one_pass"), [("channel", True), ("position", False)])
@pytest.mark.parametrize("build", [small_network, residual_network])
def test_onnx_runtime_computes_the_same(build, mass, one_pass, folded):
    x = torch.rand(4, 3, 8, 8)
    model = trained(build(mass=mass, one_pass=one_pass), x)
    others = [torch.rand(1, 3, 8, 8), torch.rand(9, 3, 8, 8)]
    outputs = run_onnx(fold(model) if folded else model, x, others=others)
    for example, output in zip([x, *others], outputs, strict=True):
        assert torch.allclose(output, model(example), atol=1e-4)


@pytest.mark.parametrize("folded", [True, False])
def test_torch_export_and_tracing_compute_the_same(folded):
    x = torch.rand(4, 3, 8, 8)
    model = trained(residual_network(), x)
    module = fold(model) if folded else model
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing is deprecated, and sees that shapes of weights are constants
        script = torch.jit.trace(module, x)
    for example in (x, torch.rand(7, 3, 8, 8)):
        assert torch.allclose(program.module()(example), model(example), atol=1e-5)
        assert torch.allclose(script(example), model(example), atol=1e-5)


@needs_dynamic_shapes
def test_a_folded_network_in_eight_bits_keeps_its_accuracy(digits, tmp_path):
    quantization = pytest.importorskip("onnxruntime.quantization")
    images, labels = digits
    model = digits_network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(150):
        batch = torch.randperm(1500)[:64]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    folded = fold(model.eval())
    assert not any(isinstance(module, BalNormLayer) for module in folded.modules())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            folded,
            (images[:2],),
            tmp_path / "float.onnx",
            input_names=["x"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            dynamo=True,
            verbose=False,
            external_data=False,
        )

    class Calibration(quantization.CalibrationDataReader):
        batches = iter(images[:1000].numpy()[:, None])

        def get_next(self):
            image = next(self.batches, None)
            return None if image is None else {"x": image}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_static(tmp_path / "float.onnx", tmp_path / "int8.onnx", Calibration())

    def accuracy(name):
        session = onnxruntime.InferenceSession(tmp_path / name)
        (scores,) = session.run(None, {"x": images[1500:].numpy()})
        return float(np.mean(scores.argmax(1) == labels[1500:].numpy()))

    full, quantized = accuracy("float.onnx"), accuracy("int8.onnx")
    assert (tmp_path / "int8.onnx").stat().st_size < 0.5 * (tmp_path / "float.onnx").stat().st_size
    assert full > 0.85
    assert quantized > full - 0.02, f"{quantized:.3f} in 8 bits, {full:.3f} in float32"
