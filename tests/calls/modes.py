"""Modes of a module in which an engine divides its calls."""

import contextlib

import torch


@contextlib.contextmanager
def graph(net):
    net.train()
    yield


@contextlib.contextmanager
def training_without_graph(net):
    net.train()
    with torch.no_grad():
        yield


@contextlib.contextmanager
def evaluation(net):
    net.eval()
    with torch.no_grad():
        yield


@contextlib.contextmanager
def inference(net):
    net.eval()
    with torch.inference_mode():
        yield


@contextlib.contextmanager
def frozen_evaluation(net):
    net.eval().requires_grad_(False)
    yield


MODES = [graph, training_without_graph, evaluation, inference, frozen_evaluation]
