"""The client's side of the Flower contender: a module of its own, which Ray's workers import once."""

from __future__ import annotations

import functools
import json

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from tests.benchmarks.experiments_contenders.trial import Plan, Trial, mlp

app = ClientApp()


@functools.lru_cache
def prepared(trial_json: str) -> tuple[Trial, Plan, Tensor, Tensor, nn.Module]:
    """Read the data and build the model, once in each worker."""
    trial = Trial(**json.loads(trial_json))
    torch.set_num_threads(trial.threads)
    plan = trial.plan()
    return trial, plan, *trial.images(train=True), mlp(plan)


@app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    trial, plan, images, classes, network = prepared(config["trial"])
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(network.parameters(), lr=trial.recipe.learning_rate)
    _, (order,) = plan.rounds[config["round"]][config["place"]]
    losses: list[Tensor] = []
    for batch in order.split(trial.recipe.batch_size):
        loss = nn.functional.cross_entropy(network(images[batch]), classes[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    metrics = {
        "num-examples": 1 if trial.recipe.uniform else len(order),
        "train_loss": torch.stack(losses).mean().item(),
    }
    content = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(content=RecordDict(content), reply_to=message)
