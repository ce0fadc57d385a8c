"""ngu_r2d2.py beside tests/reference/ngu.py: recorded runs of the whole script on small environments.

The reference is told what environments, actions, policies of episodes and sequences of batches were. It
computes all else: what the networks see and say, states, novelty, the replay's table, priorities, weights,
targets, gradients, Adam, the target network, and what is logged and saved. What is drawn by chance is
compared with its probabilities. Evaluation goes through the same reference. First weights are taken as found.
"""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from reference import ngu as reference
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import ngu_r2d2


class Ring(gym.Env):
    """Places in a ring, half of which look the same each time. Half of the steps have rewards, all different.

    Episodes have 1 to 30 steps, and a time limit cuts four of ten. Each environment draws by its own seed.
    """

    action_space = gym.spaces.Discrete(3)

    def __init__(self, kind):
        shapes = {"vector": (5,), "grid": (7, 7, 3), "pixels": (36, 36, 3)}
        high = {"vector": np.inf, "grid": 10, "pixels": 255}[kind]
        dtype, rng = np.float32 if kind == "vector" else np.uint8, np.random.default_rng(5)
        low = -np.inf if kind == "vector" else 0
        self.observation_space = gym.spaces.Box(low, high, shapes[kind], dtype)
        random = rng.normal if kind == "vector" else lambda size: rng.integers(high + 1, size=size)
        self.looks = random(size=(6, *shapes[kind])).astype(dtype)

    def observe(self):
        obs = self.looks[self.place].copy()
        if self.place % 2:
            obs.flat[0] = self.np_random.integers(11)
        return obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.place = 0, int(self.np_random.integers(6))
        self.length, self.is_cut = self.np_random.integers(1, 31), self.np_random.random() < 0.4
        return self.observe(), {}

    def step(self, action):
        self.t, self.place = self.t + 1, (self.place + int(action) - 1) % 6
        reward = float(self.np_random.normal()) * 3 if self.np_random.random() < 0.5 else 0.0
        over = bool(self.t == self.length)
        return self.observe(), reward, over and not self.is_cut, over and self.is_cut, {}


for kind in ("vector", "grid", "pixels"):
    gym.register(f"Ring-{kind}-v0", Ring, kwargs=dict(kind=kind), disable_env_checker=True)


# === Recording ===


def address(x):
    return x.untyped_storage().data_ptr()


def copies(named):
    return {name: x.detach().double().contiguous().clone() for name, x in named}


@contextmanager
def recorded(monkeypatch):
    """What happens in the script: events (kind, values), and networks as they were before their first use.

    Kinds are reset, act, step; online and target, as an update asks both networks; learn and auxiliary, after
    the steps of both optimizers. All that this module knows of the script's inner names is here.
    """
    events, networks, modules, seen = [], {}, {}, {}
    make_env = ngu_r2d2.make_env

    def note(kind, **values):
        events.append((kind, SimpleNamespace(**values)))

    def wrapped(args, num_envs, *rest):
        envs = make_env(args, num_envs, *rest)
        reset, step = envs.reset, envs.step

        def noted_reset(*, seed=None, **more):
            obs, info = reset(seed=seed, **more)
            if seed is not None:
                note("reset", obs=obs.copy(), seed=seed)
            return obs, info

        def noted_step(actions):
            obs, rewards, terminated, truncated, info = step(actions)
            last, over = obs.copy(), terminated | truncated
            for n in over.nonzero()[0]:
                last[n] = info["final_obs"][n]
            values = dict(actions=np.copy(actions), obs=obs.copy(), last=last, rewards=rewards.copy())
            note("step", terminated=terminated, truncated=truncated, **values)
            return obs, rewards, terminated, truncated, info

        envs.reset, envs.step = noted_reset, noted_step
        return envs

    def before(module, _):
        name = type(module).__name__
        if name in ("Agent", "Curiosity") and name not in networks:
            networks[name], modules[name] = copies(module.state_dict().items()), module

    def after(module, inputs, output):
        if isinstance(module, torch.nn.LSTM):
            seen.update(x=inputs[0].detach().double().clone(), state=torch.cat(inputs[1]).detach().double())
        if type(module).__name__ == "Agent":
            kind = "online" if torch.is_grad_enabled() else "act" if len(seen["x"]) == 1 else "target"
            note(kind, q=output[0].detach().double(), **seen)

    def learned(optimizer, *_):
        (flat,) = optimizer.param_groups[0]["params"]
        for kind, name in (("learn", "Agent"), ("auxiliary", "Curiosity")):
            named = (
                {k: x for k, x in modules[name].named_parameters() if x.requires_grad}
                if name in modules
                else {}
            )
            if any(
                flat.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in named.values()
            ):
                gradients = copies((k, x.grad) for k, x in named.items())
                note(kind, gradients=gradients, weights=copies(named.items()))

    with monkeypatch.context() as patch:
        patch.setattr(ngu_r2d2, "make_env", wrapped)
        hooks = register_module_forward_pre_hook(before), register_module_forward_hook(after)
        hooks += (register_optimizer_step_post_hook(learned),)
        try:
            yield SimpleNamespace(events=events, networks=networks)
        finally:
            for hook in hooks:
                hook.remove()


# === Comparing ===


def close(ours, theirs, what, tolerance=1e-4):
    """To a share of the largest number."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape, what
    np.testing.assert_allclose(
        ours, theirs, rtol=0, atol=tolerance * (abs(theirs).max() + 1e-9), err_msg=what
    )


def all_close(ours, theirs, what, tolerance=1e-4):
    assert ours.keys() == theirs.keys(), what
    for name in ours:
        close(ours[name], theirs[name], f"{what}: {name}", tolerance)


def apart(ours, theirs, what):
    """Largest difference of gradients, as a share of the largest in a tensor. By norms none may be large."""
    assert ours.keys() == theirs.keys(), what
    most = 0.0
    for name, x in theirs.items():
        difference = ours[name] - x
        assert difference.norm() <= 0.2 * x.norm() + 1e-9, f"gradient of {what}: {name}"
        most = max(most, (difference.abs().max() / (x.abs().max() + 1e-9)).item())
    return most


def stepped(optimizer, weights, theirs):
    """Weights of the script after a step, changed as ours. Going on with them, rounding does not add up."""
    ours = dict(weights)
    optimizer.step(ours, theirs.gradients)
    changes = [{name: x - weights[name] for name, x in after.items()} for after in (ours, theirs.weights)]
    all_close(*changes, "changes of weights", 1e-3)
    return theirs.weights


class Chances:
    """Counts of what happened by chance, beside their expectations and variances."""

    def __init__(self):
        self.sums = {}

    def add(self, name, happened, p):
        self.add_number(name, happened, p, p * (1 - p))

    def add_number(self, name, x, expected, variance):
        self.sums[name] = self.sums.get(name, 0) + np.array((x - expected, variance))

    def add_choices(self, name, choices):
        """(chosen, its options) of some that choose at the same time: evenly, and apart from each other."""
        for i, (chosen, options) in enumerate(choices):
            for at, option in enumerate(options):
                self.add(f"{name} {at} of {len(options)}", chosen == option, 1 / len(options))
            for other, others in choices[:i]:
                p = len(set(options) & set(others)) / (len(options) * len(others))
                self.add(f"{name}, two alike", chosen == other, p)

    def check(self):
        for name, (difference, variance) in self.sums.items():
            assert abs(difference) <= 0.5 + 4.5 * np.sqrt(variance), (name, difference, variance)


class Comparison:
    """Plays the events of a run to the reference, and compares what it computes."""

    def __init__(self, args, record):
        self.args, self.events, self.chances = args, list(record.events), Chances()
        agent, curiosity = record.networks["Agent"], record.networks.get("Curiosity", {})
        (_, first), (_, act) = self.events[:2]
        self.N, self.A = len(first.obs), agent["advantage.2.bias"].numel()
        self.seeds = range(first.seed, first.seed + self.N)
        policies = self.policies(act)
        self.chances.add_choices("policy", [(policy, range(args.num_policies)) for policy in policies])
        self.ref = reference.Reference(args, self.A, agent, dict(curiosity), first.obs, policies)
        self.events, self.next = self.events[1:], 0
        self.log, self.returns, self.explored, self.apart = {}, [], [], []

    def take(self, kind):
        found, values = self.events[self.next] if self.next < len(self.events) else ("nothing", None)
        assert found == kind, f"{found} where the reference has {kind}"
        self.next += 1
        return values

    def policies(self, act):
        """Those of all environments by what the LSTM saw, which ends with their one-hot codes."""
        one_hot = act.x[0, :, -self.args.num_policies :]
        assert ((one_hot == 0) | (one_hot == 1)).all() and (one_hot.sum(-1) == 1).all()
        return one_hot.argmax(-1).tolist()

    def noted(self, scalars, step):
        for name, x in scalars.items():
            if np.isfinite(x):
                self.log.setdefault(name, []).append((step, float(x)))

    def step(self, epsilons, end, is_evaluation=False):
        """One step of all environments, and what is logged of novelty. end: environment steps after it."""
        ref, act = self.ref, self.take("act")
        x, states, values = ref.act()
        close(x, act.x[0], "what the LSTM sees")
        close(states, act.state, "states")
        close(values, act.q[0], "action values")
        step = self.take("step")
        explored, choices = [], []
        for n in range(self.N):
            p, greedy = epsilons[n] * (self.A - 1) / self.A, int(values[n].argmax())
            is_other = step.actions[n] != greedy
            self.chances.add(f"environment {n} explores", is_other, p)
            explored.append((is_other - p) / np.sqrt(p * (1 - p)) if p > 0.02 else 0)
            if is_other:
                choices.append((step.actions[n], [a for a in range(self.A) if a != greedy]))
        self.chances.add_choices("random action", choices)
        self.explored.append(explored)
        logged = ref.arrive(step.actions, step.last, step.rewards, step.terminated, step.truncated)
        drawn = []
        for n in range(self.N):
            row, episode = ref.episodes[n].rows[-1], ref.episodes[n]
            if row.ends:
                total = sum(row.r_ext for row in episode.rows)
                self.returns += [total] if episode.policy == 0 else []
                self.noted({"charts/episodic_return": total, f"policies/return_{episode.policy}": total}, end)
                self.noted({"charts/episodic_length": len(episode.rows) - 1}, end)
                following = next((e for kind, e in self.events[self.next :] if kind == "act"), None)
                policy = self.policies(following)[n] if following else 0
                if following and not is_evaluation:
                    drawn.append((policy, range(self.args.num_policies)))
                    self.chances.add("policy as before", policy == episode.policy, 1 / self.args.num_policies)
                ref.begin(n, step.obs[n], policy)
        self.chances.add_choices("policy", drawn)
        ref.forget()
        return logged

    def find(self, x):
        """Place in the table and policy of a sequence, by what the LSTM saw of it (L + 1, ...)."""
        ref, size, found = self.ref, self.args.hidden_size, []
        policy = int(x[0, -self.args.num_policies :].argmax())
        for place, sequence in enumerate(ref.table):
            known = torch.stack([ref.inputs(row, policy) for row in sequence.rows])
            seen = x[: len(known), size:]
            is_padded = len(x) == len(known) or not x[len(known) :, size + ref.A : size + ref.A + 2].any()
            if is_padded and (known - seen).abs().max() < 1e-3 * (1 + seen.abs().max()):
                obs = np.stack([reference.scaled(row.obs) for row in sequence.rows])
                with torch.no_grad():
                    features = reference.encode(ref.weights, "encoder", obs)
                if (features - x[: len(known), :size]).abs().max() < 1e-3:
                    found.append(place)
        assert len(found) == 1, f"{len(found)} sequences of the table are as one of the batch"
        return found[0], policy

    def update(self):
        """One update; what is logged of it and the number of steps that it trained on."""
        args, ref, parts = self.args, self.ref, []
        while self.events[self.next][0] == "online":
            parts.append(self.take("online"))
        online, target = torch.cat([part.x for part in parts]), self.take("target")
        q = torch.cat([part.q for part in parts])
        assert q.shape[:2] == (args.burn_in + args.unroll + 1, args.batch_sequences)
        places, policies = zip(*(self.find(online[:, b]) for b in range(args.batch_sequences)), strict=True)
        self.check_draw(places, policies)
        learn = self.take("learn")
        gradients, both, logged, trained = ref.update(list(places), policies)
        for b, (ours, of_target) in enumerate(both):
            close(ours, q[: len(ours), b], "online action values of a batch")
            close(of_target, target.q[: len(ours), b], "target action values of a batch")
        self.apart.append(apart(gradients, learn.gradients, "agent"))
        ref.weights = stepped(ref.optimizer, ref.weights, learn)
        if ref.curiosity and (args.train_embedding or args.rnd):
            auxiliary = self.take("auxiliary")
            gradients, more = ref.auxiliary_update(places)
            self.apart.append(apart(gradients, auxiliary.gradients, "curiosity"))
            weights = {name: ref.curiosity.weights[name] for name in gradients}
            ref.curiosity.weights |= stepped(ref.auxiliary, weights, auxiliary)
            logged |= more
        ref.after_update()
        return logged, trained

    def check_draw(self, places, policies):
        """Sequences are drawn by their probabilities, one by one; policies anew for some of them."""
        p, share, N = self.ref.probabilities(), self.args.cross_mixture, self.args.num_policies
        mean, choices = (p * np.log(p)).sum(), []
        for place, policy in zip(places, policies, strict=True):
            self.chances.add_number("probable", np.log(p[place]), mean, (p * np.log(p) ** 2).sum() - mean**2)
            player = self.ref.table[place].episode.policy
            self.chances.add("trained for another policy", policy != player, share * (N - 1) / N)
            if policy != player:
                choices.append((policy, [i for i in range(N) if i != player]))
        self.chances.add_choices("other policy", choices)
        same = sum(a == b for i, a in enumerate(places) for b in places[:i])
        pairs = len(places) * (len(places) - 1) / 2
        self.chances.add_number("drawn twice", same, pairs * (p**2).sum(), pairs * (p**2).sum())

    def run(self):
        args, ref, seen, trained = self.args, self.ref, [], 0
        epsilons = [reference.exploration(n, self.N, args.epsilon) for n in range(self.N)]
        for iteration in range(args.num_iterations):
            steps, logged = iteration * args.batch_size, {}
            for _ in range(args.num_steps):
                steps += self.N
                seen.append(self.step(epsilons, steps))
            if ref.steps >= args.learning_starts and ref.table:
                for _ in range(args.updates_per_rollout):
                    logged, number = self.update()
                    trained += number
            if iteration + 1 == args.num_iterations or (iteration + 1) % args.log_every == 0:
                self.noted({f"losses/{name}": x for name, x in logged.items()}, steps)
                self.noted(
                    {"charts/replay_ratio": trained / steps, "replay/sequences": len(ref.table)}, steps
                )
                p = np.array([sequence.priority for sequence in ref.table])
                if len(p):
                    self.noted(
                        {f"replay/priority_{k}": getattr(p, k)() for k in ("mean", "std", "max")}, steps
                    )
                means = {f"curiosity/{k}": np.mean([x[k] for x in seen]) for k in seen[-1]}
                self.noted(means, steps)
                seen = []
        assert self.next == len(self.events), "more happened than the reference has"
        self.check_chances()
        # A unit whose input is 0 but for rounding may have a gradient in float32 alone.
        assert sum(most > 1e-4 for most in self.apart) <= 1 + 0.01 * len(self.apart), self.apart

    def evaluate(self, record, returns, episodes, epsilon):
        """Episodes of policy 0 alone, by what training left, with frozen statistics and new memories."""
        args, ref = replace(self.args, num_envs=1), self.ref
        self.events, self.next, self.N, self.chances = record.events, 0, 1, Chances()
        first, ref.args = self.take("reset"), args
        assert first.seed not in self.seeds and first.seed > self.args.seed + self.args.total_timesteps
        ref.episodes, ref.table, self.returns, self.explored = [None], [], [], []
        if ref.curiosity:
            ref.curiosity.learns = False
        ref.begin(0, first.obs[0], 0)
        while self.next < len(self.events):
            self.step([epsilon], 0, is_evaluation=True)
            assert ref.episodes[0].policy == 0
        close(self.returns, returns, "returns of evaluation")
        assert len(returns) == episodes
        self.check_chances()

    def check_chances(self):
        """Also that environments explore apart from each other, and from what they did before."""
        self.chances.check()
        z, N = np.array(self.explored), np.any(self.explored, axis=0).sum()
        pairs = (z.sum(1) ** 2 - (z**2).sum(1)).sum() / 2
        assert abs(pairs) <= 4.5 * np.sqrt(len(z) * N * (N - 1) / 2), "environments explore together"
        for lag in range(1, 2 * self.args.num_steps + 1):
            products = z[lag:].sum(1) * z[:-lag].sum(1)
            assert abs(products.sum()) <= 4.5 * N * np.sqrt(len(products)), f"explores as {lag} steps ago"


def check_logs(run_dir, comparison):
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(comparison.log) | {"charts/SPS"}
    for tag, ours in comparison.log.items():
        theirs = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in ours] == [step for step, _ in theirs], tag
        close([x for _, x in ours], [x for _, x in theirs], tag)


def check_checkpoint(run_dir, args, comparison):
    saved, ref = torch.load(run_dir / "checkpoint.pt", weights_only=True), comparison.ref
    all_close(ref.weights, copies(saved["agent"].items()), "saved agent", 1e-7)
    all_close(ref.target, copies(saved["target_agent"].items()), "saved target", 1e-7)
    assert saved["updates"] == ref.updates and saved["iteration"] == args.num_iterations
    close(saved["last_returns"], comparison.returns[-100:], "last returns")
    if ref.curiosity:
        theirs = copies(saved["curiosity"].items())
        for name, x in ref.curiosity.weights.items():
            if name.startswith(("embedding", "inverse", "rnd")):
                close(x, theirs[name], name, 1e-7)
        if args.rnd:
            for name in ("whitening", "errors"):
                moments, buffers = (
                    getattr(ref.curiosity, name),
                    (theirs[f"{name}.mean"], theirs[f"{name}.var"]),
                )
                for ours, buffer in zip((moments.mean, moments.var), buffers, strict=True):
                    close(ours, buffer.reshape(np.shape(ours)), name)
        newest = ref.curiosity.newest
        for name, x in newest.weights.items():
            close(x, theirs[name.replace("embedding", "acting_embedding", 1)], "acting embedding", 1e-7)
        total, number = theirs["acting_embedding.distances"]
        close(newest.mean(), total / number, "mean distance")


FLAGS = dict(device="cpu", seed=3, num_envs=4, num_steps=4, hidden_size=12, batch_sequences=4, epsilon=0.8)
FLAGS |= dict(
    burn_in=3, unroll=6, period=4, replay_steps=400, memory_size=12, adam_eps=1e-4, auxiliary_steps=5
)
RUNS = {
    "vector": dict(
        env_id="Ring-vector-v0", total_timesteps=640, learning_starts=100, target_every=3, embedding_every=4,
        num_policies=3, beta=0.5, neighbors=4, n_step=3, h_eps=0.05, max_grad_norm=0.5, log_every=3,
        last_reward_weight=3.0,
    ),
    "grid": dict(
        env_id="Ring-grid-v0", total_timesteps=480, learning_starts=200, target_every=4, embedding_every=5,
        num_policies=2, beta=1.0, neighbors=70, target="retrace", retrace_lambda=0.9, eval_epsilon=0.2,
        bootstrap_truncated=False, bonus="min-max", squash_reward=False, cross_mixture=0.3, log_every=1,
        updates_per_rollout=1,
    ),
    "pixels": dict(
        env_id="Ring-pixels-v0", total_timesteps=160, learning_starts=80, target_every=2, embedding_every=3,
        num_policies=4, beta=0.3, neighbors=5, target="retrace", burn_in=0, period=6, rnd_max=1.5,
        bonus="long-run-mean", num_envs=2, replay_steps=120, log_every=2, train_embedding=False,
    ),
    "r2d2": dict(
        env_id="Ring-vector-v0", total_timesteps=400, learning_starts=50, target_every=5, num_policies=1,
        beta=0.0, h_eps=0.02, importance_exponent=1.0, priority_exponent=0.8, priority_eta=0.6, log_every=2,
        replay_steps=80, batch_sequences=6,
    ),
    "long": dict(
        env_id="Ring-vector-v0", total_timesteps=2432, learning_starts=2240, replay_steps=2240, num_envs=8,
        num_policies=5, epsilon=0.6, updates_per_rollout=1, log_every=5,
    ),
}  # fmt: skip


def test_defaults_are_those_of_the_papers():
    """Where docs/ngu.md names no other value."""
    args = ngu_r2d2.Args()
    assert (args.epsilon, args.priority_exponent, args.priority_eta) == (0.4, 0.9, 0.9)
    assert (args.importance_exponent, args.n_step, args.h_eps, args.max_grad_norm) == (0.6, 5, 1e-3, 40)
    assert (args.eval_epsilon, args.retrace_lambda) == (0.01, 0.95)
    assert (args.neighbors, args.kernel_eps, args.rnd, args.rnd_max, args.auxiliary_lr) == (
        10,
        1e-3,
        True,
        5,
        5e-4,
    )


@pytest.mark.parametrize("name", RUNS)
def test_a_run(name, monkeypatch):
    args = ngu_r2d2.Args(**FLAGS | RUNS[name])
    with recorded(monkeypatch) as record:
        run_dir = ngu_r2d2.train(args)
    comparison = Comparison(args, record)
    comparison.run()
    check_logs(run_dir, comparison)
    check_checkpoint(run_dir, args, comparison)
    with recorded(monkeypatch) as record:
        returns = ngu_r2d2.evaluate(replace(args, evaluate=str(run_dir), eval_episodes=8, eval_epsilon=0.3))
    comparison.evaluate(record, returns, episodes=8, epsilon=0.3)
