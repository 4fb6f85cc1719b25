"""LayerMap: which tensors form a layer, and what each tensor is."""

import numpy as np
import pytest
import torch
from torch import nn

from client_apps import models
from strategies import LayerMap


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3)
        self.norm2 = nn.GroupNorm(1, 8)
        self.fc = nn.Linear(8, 2)


def groups(layers):
    return {x.name: [layers.names[t] for t in x.tensors] for x in layers.layers}


def test_weight_and_bias_form_a_layer_and_a_norm_joins_the_one_before_it():
    layers = LayerMap.from_module(Block())
    assert groups(layers) == {
        "conv1": ["conv1.weight", "norm1.weight", "norm1.bias"],
        "conv2": ["conv2.weight", "conv2.bias", "norm2.weight", "norm2.bias"],
        "fc": ["fc.weight", "fc.bias"],
    }
    assert [x.size for x in layers.layers] == [3 * 8 * 9 + 16, 8 * 8 * 9 + 8 + 16, 18]
    kinds = dict(zip(layers.names, layers.kinds, strict=True))
    assert kinds["norm1.running_var"] == "buffer"
    assert kinds["norm1.num_batches_tracked"] == "counter"
    assert layers.size == sum(p.numel() for p in Block().parameters())


def test_names_alone_give_the_same_map():
    module = Block()
    state = module.state_dict()
    assert LayerMap.from_names(list(state), [t.shape for t in state.values()]) == LayerMap.from_module(module)


def test_a_norm_that_comes_first_is_its_own_layer_and_nested_norms_join():
    module = nn.Sequential(nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.InstanceNorm1d(4))
    assert list(groups(LayerMap.from_module(module))) == ["0", "1.0"]


def test_frozen_parameters_are_buffers():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    layers = LayerMap.from_module(module)
    assert layers.kinds == ("trainable", "buffer")
    assert [x.tensors for x in layers.layers] == [(0,)]


def test_tied_weights_move_together():
    module = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    module[2].weight = module[0].weight
    layers = LayerMap.from_module(module)
    assert groups(layers) == {"0": ["0.weight", "2.weight"], "1": ["1.weight", "1.bias"]}


def test_a_parameter_of_the_root_module_has_its_tensor_name():
    module = nn.Linear(2, 2)
    assert [x.name for x in LayerMap.from_module(module).layers] == ["weight"]


def test_arrays_alone_are_layers_of_their_own():
    layers = LayerMap.from_arrays(
        [np.zeros((2, 2), np.float16), np.zeros(()), np.zeros(3, np.int64), np.zeros(1, bool)]
    )
    assert layers.kinds == ("trainable", "trainable", "counter", "counter")
    assert [x.tensors for x in layers.layers] == [(0,), (1,)]


def test_integer_arrays_are_counters_whatever_the_name_says():
    layers = LayerMap.from_names(["fc.weight", "fc.steps"], [(2, 2), ()])
    checked = layers.for_arrays([np.zeros((2, 2)), np.array(3)])
    assert checked.kinds == ("trainable", "counter")
    assert checked.layers[0].tensors == (0,)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [([np.zeros((2, 2))], "2 tensors but the global model has 1"), ([np.zeros((2, 2)), np.zeros(3)], "fc.bias")],
)
def test_a_map_of_another_model_is_refused(arrays, words):
    with pytest.raises(ValueError, match=words):
        LayerMap.from_names(["fc.weight", "fc.bias"], [(2, 2), (2,)]).for_arrays(arrays)


def test_bad_names_are_refused():
    with pytest.raises(ValueError, match="2 names but 1 shapes"):
        LayerMap.from_names(["a", "b"], [()])
    with pytest.raises(ValueError, match="twice"):
        LayerMap.from_names(["a", "a"], [(), ()])
    with pytest.raises(ValueError, match="at least one tensor"):
        LayerMap.from_module(nn.Sequential())


def test_renamed_parameters_are_found_and_complex_ones_refused():
    class Wrapper(nn.Module):
        """Keeps its content out of the names, as activation checkpointing does."""

        def __init__(self, inner):
            super().__init__()
            self._inner = inner
            self._register_state_dict_hook(lambda module, state, prefix, _: rename(state, prefix))

    def rename(state, prefix):
        for key in [k for k in state if k.startswith(prefix + "_inner.")]:
            state[prefix + key[len(prefix + "_inner.") :]] = state.pop(key)

    module = nn.Sequential(Wrapper(nn.Linear(2, 3)), nn.LayerNorm(3))
    layers = LayerMap.from_module(module)
    assert set(layers.names) == set(module.state_dict())
    assert layers.kinds == ("trainable",) * 4
    assert len(layers.layers) == 1
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(module.weight.to(torch.complex64))
    with pytest.raises(ValueError, match="complex64"):
        LayerMap.from_module(module)


def test_a_norm_of_ones_own_joins_too():
    class RMS(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    module = nn.Sequential(nn.Linear(3, 4), RMS(), nn.Linear(4, 2))
    expected = {"0": ["0.weight", "0.bias", "1.weight"], "2": ["2.weight", "2.bias"]}
    assert groups(LayerMap.from_module(module)) == expected
    state = module.state_dict()
    assert groups(LayerMap.from_names(list(state), [t.shape for t in state.values()])) == expected


def test_a_bare_name_is_not_the_module_of_that_name():
    layers = LayerMap.from_names(["a", "a.weight", "b.weight"], [(3,), (2, 2), (2,)])
    assert [[layers.names[t] for t in x.tensors] for x in layers.layers] == [["a"], ["a.weight", "b.weight"]]


def test_counters_that_averaging_made_floats_are_buffers():
    layers = LayerMap.from_names(["bn.weight", "bn.num_batches_tracked"], [(2,), ()])
    assert layers.for_arrays([np.zeros(2), np.array(3.0)]).kinds == ("trainable", "buffer")


def test_a_resnet_20_has_20_layers():
    # CRAFT's released models: 20 groups, d = 269,722.
    module = models.build({"name": "resnet", "depth": 20, "norm": "group"}, channels=3, side=32, num_classes=10)
    layers = LayerMap.from_module(module)
    assert (len(layers.layers), layers.size) == (20, 269_722)
    assert sum(len(x.tensors) for x in layers.layers) == len(module.state_dict())
