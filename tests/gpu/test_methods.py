"""Each method on an accelerator is that on the CPU, and clients that step together are those that train in turn."""

from lightning_lowrank.testing.experiment import blobs
from tests.algorithms.methods import each_method
from tests.gpu.places import apart, experiment, precise, run, tolerance


@each_method()
def test_methods_are_those_on_the_cpu(place, name):
    dtype = precise(place)
    of, data = experiment(name), blobs(28, dtype=dtype)
    # FedBAT binarises by draws on the clients' device.
    expected = run(place if name == "FedBAT" else "cpu", of, data=data)
    for execution in ("sequential", "vectorized"):
        found = run(place, of, data=data, execution=execution)
        assert found.traffic == expected.traffic
        assert apart(found.weights, expected.weights) < tolerance(dtype), execution
