"""The client's half on Flower: a mod that clips the whole update, and an answer to "who are you?".

    app's train function:   arrays → arrays (new parameters)
    mod:                    Δ = new − sent,   sent back: Δ · min(1, ζ/‖Δ‖), step, user

and ‖Δ‖ where the clip norm follows a quantile. Any ClientApp that returns its new parameters as one
ArrayRecord will do; its metrics are dropped: no noise covers them. A client is the partition id of
its node, or what `user_fn` makes of the context; with `PublicKeys` it is not asked.

State: none, or the file of a `Timer`, claimed before the training function is called.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor, nn

from noshuffle.errors import InvalidInput
from noshuffle.federated import flower_wire as wire
from noshuffle.federated.clients import (
    LocalTraining,
    LossFn,
    clip_delta,
    own_draws,
    training_of,
)
from noshuffle.federated.vectorised import takes_together, trained_alone

if TYPE_CHECKING:  # a client is started for every message, and need not know the server's half
    from noshuffle.federated.cohort import UserId
    from noshuffle.federated.tasks import FederatedTask
    from noshuffle.federated.timer import Timer

UserFn = Callable[[Context], "UserId"]
TimerFn = Callable[[Context], "Timer | None"]
#: What a client trains with: the data by user, the architecture, what to do, the loss.
Parts = tuple["FederatedTask", nn.Module, LocalTraining, LossFn]
PartsFn = Callable[[Context], Parts]


def partition_of(context: Context) -> int:
    """The partition id in a node's configuration; a simulation gives one to every node."""
    found = context.node_config.get("partition-id")
    if not isinstance(found, int) or isinstance(found, bool):
        raise InvalidInput(
            f"partition-id in this node's configuration must be a whole number, got {found!r}; "
            "configure the node with one, or name users by another user_fn"
        )
    return found


def client_app(
    train_fn: ClientAppCallable,
    *,
    user_fn: UserFn | None = partition_of,
    timer: TimerFn | None = None,
) -> ClientApp:
    """A ClientApp that trains by `train_fn` (Flower's own signature), clips, and says who it is."""
    app = ClientApp(mods=[clip_mod(user_fn=user_fn, timer=timer)])
    app.train()(train_fn)
    if user_fn is not None:
        identify(app, user_fn=user_fn)
    return app


def identify(app: ClientApp, *, user_fn: UserFn = partition_of) -> None:
    """Let an app answer the strategy's handshake."""

    @app.query(wire.ASK_IDENTITY.split(".")[1])
    def answer(message: Message, context: Context) -> Message:
        record = ConfigRecord({wire.USER: user_fn(context)})
        return Message(RecordDict({wire.IDENTITY: record}), reply_to=message)


def task_client(parts_fn: PartsFn, *, vectorise: bool | None = None, **more: Any) -> ClientApp:
    """A ClientApp for a task: partition i is the task's user number i, by that user's own id.

    `parts_fn` is called when work comes, in the client's own process; let it remember its result.
    `vectorise` chooses the arithmetic as in `simulate`, whose bits a client then has: that of a
    client among others, or of one by itself. Further arguments go to `client_app`.
    """

    def user_of(context: Context) -> UserId:
        users, place = parts_fn(context)[0].users, partition_of(context)
        if not 0 <= place < len(users):
            raise InvalidInput(f"partition-id must be in 0 … {len(users) - 1}, got {place}")
        return users[place]

    def train(message: Message, context: Context) -> Message:
        task, model, local, loss_fn = parts_fn(context)
        parameters, _, _ = wire.order_of(message)
        x, y = task.client(user_of(context))
        as_in_a_group = takes_together(model, device=x.device, vectorise=vectorise)
        with own_draws(secrets.randbits(56), x.device):
            if as_in_a_group:
                now = trained_alone(model, parameters, x, y, local=local, loss_fn=loss_fn)
            else:
                now = training_of(model, parameters, local=local, loss_fn=loss_fn)(x, y)
        return Message(RecordDict({wire.ARRAYS: wire.to_arrays(now)}), reply_to=message)

    return client_app(train, user_fn=user_of, **more)


def clip_mod(*, user_fn: UserFn | None = None, timer: TimerFn | None = None) -> Mod:
    """The mod; first in the list of mods, so that nothing touches the update after it.

    Arguments:
        user_fn: says in every reply who sent it, which the server compares with the handshake.
        timer: gives the device's own limit, if it has one; a client whose timer is not due declines
            without training.

    Guarantees: what leaves has L2 norm at most the clip norm sent, over all floating-point tensors
    together, 0-d ones included; an update with NaN or infinity leaves as zeros; an update of zero
    stays zero. Integer tensors and metrics do not leave, nor does the norm unless it is asked for.
    Tensors that are missing, renamed or reshaped stop the reply with one line.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        start, step, clip_norm = wire.order_of(message)
        record = ConfigRecord({wire.STEP: step})
        own_limit = None if timer is None else timer(context)
        if own_limit is not None and not own_limit.claim():
            record[wire.WHY] = "the timer of this device is not due"
            return Message(RecordDict({wire.DECLINED: record}), reply_to=message)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        sent = clip_delta(difference(start, _new_parameters(reply)), clip_norm=clip_norm)
        if wire.section(message, wire.CONFIG).get(wire.WANTS_NORM) is True:
            record[wire.NORM] = sent.norm
        if user_fn is not None:
            record[wire.USER] = user_fn(context)
        content = RecordDict({wire.DELTA: wire.to_arrays(sent.values), wire.UPDATE: record})
        return Message(content, reply_to=message)

    return mod


def difference(start: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """now − start by name, for what is floating point in `start`.

    `now` may hold integer tensors more (buffers that count); anything else that differs in name
    or shape is refused.
    """
    for name, value in now.items():
        if name not in start and value.is_floating_point():
            raise InvalidInput(
                f"the app returned {name!r}, which the server did not send; return the tensors "
                "that came, by the same names"
            )
    delta = {}
    for name, value in start.items():
        if name not in now or now[name].shape != value.shape:
            got = "nothing" if name not in now else f"shape {tuple(now[name].shape)}"
            raise InvalidInput(
                f"the app must return {name!r} of shape {tuple(value.shape)}, got {got}"
            )
        if value.is_floating_point():
            wide = torch.promote_types(value.dtype, now[name].dtype)
            delta[name] = now[name].to(wide) - value.to(wide)
    return delta


def _new_parameters(reply: Message) -> dict[str, Tensor]:
    records = [r for r in reply.content.values() if isinstance(r, ArrayRecord)]
    found = reply.content.get(wire.ARRAYS, records[0] if len(records) == 1 else None)
    if not isinstance(found, ArrayRecord):
        raise InvalidInput(
            f"the app must return its new parameters as one ArrayRecord named {wire.ARRAYS!r}, got "
            f"{sorted(reply.content)}"
        )
    return wire.to_tensors(found)
