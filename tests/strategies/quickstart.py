"""A ClientApp of the message API, as Flower's PyTorch quickstart has them; Ray workers import this module."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

CLIENTS = 6


class Net(nn.Module):
    """Two layers and batch normalisation, whose counter is a 0-d int64 tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.fc(x))))


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def data(partition):
    rng = np.random.default_rng(partition)
    x = rng.normal(size=(16 + partition, 4)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy((x[:, 0] > 0).astype(np.int64) + partition % 2)


app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    x, y = data(context.node_config["partition-id"])
    optimizer = torch.optim.SGD(model.parameters(), lr=msg.content["config"]["lr"])
    loss = torch.zeros(())
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(x)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    model.eval()
    x, y = data(context.node_config["partition-id"])
    with torch.no_grad():
        out = model(x)
    accuracy = (out.argmax(1) == y).float().mean().item()
    loss = nn.functional.cross_entropy(out, y).item()
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(x)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
