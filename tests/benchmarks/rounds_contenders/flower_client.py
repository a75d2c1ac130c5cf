"""The client's side of the Flower contender: a module of its own, which Ray's workers import once."""

from __future__ import annotations

import functools
import json

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from tests.benchmarks.rounds_contenders.experiment import Setting

app = ClientApp()


@functools.lru_cache
def prepared(setting_json: str) -> tuple[Setting, Tensor, Tensor, list[Tensor], nn.Module]:
    """Read the data and build the model, once in each worker."""
    setting = Setting(**json.loads(setting_json))
    torch.set_num_threads(setting.threads)
    return setting, *setting.mnist(train=True), setting.client_indices(), setting.module()["net"]


@app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    setting, images, classes, clients, network = prepared(config["setting"])
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(network.parameters(), lr=setting.learning_rate)
    indices = clients[config["client"]]
    for batch in setting.batches(indices):
        loss = nn.functional.cross_entropy(network(images[batch]), classes[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(network.state_dict()),
        "metrics": MetricRecord({"num-examples": len(indices)}),
    }
    return Message(content=RecordDict(content), reply_to=message)
