#include "smartinf/config/keys.h"

#include <array>

#include <fmt/format.h>

namespace smartinf::config {
namespace {

base::NumberOrWord stages_of(uint32_t& stages) {
  return {&stages, 0, "auto", "the number of stages"};
}

base::NumberOrWord compressed_stages_of(uint32_t& stages) {
  return {&stages, compress::kAllStages, "all", "the number of stages", compress::kChosenStages,
          "auto"};
}

base::NumberOrWord rank_of(uint32_t& rank) {
  return {&rank, engine::kAnyRank, "auto", "the number of a rank"};
}

// One key a line; the member and the key have the same name, but for sizes, whose unit is in the
// value ("512MiB").
#define SI_KEY(key, target, help)                                      \
  Key {                                                                \
    key, help, [](Recipe& r, size_t) -> base::Field { return target; } \
  }
#define SI_DEVICE_KEY(key, target, help)                                 \
  Key {                                                                  \
    key, help, [](Recipe& r, size_t i) -> base::Field { return target; } \
  }

constexpr std::array kSections{
    Section{"model", "A decoder-only transformer: from a folder, or of the Llama architecture."},
    Section{"lora",
            "Low-rank adapters: trained instead of the weights of model.from (docs/models.md)."},
    Section{"data", "The text or tokens that the model is trained on."},
    Section{"train", "The training loop."},
    Section{"checkpoint", "Copies of the state, made between two steps (docs/state.md)."},
    Section{"optimizer", "The update rule, and where it runs."},
    Section{"compress", "Compression of gradients before the host link (docs/smartcomp.md)."},
    Section{"engine", "How the state is moved and stored (docs/devices.md)."},
    Section{"memory", "What stays in memory, and how much of it may be used (docs/memory.md)."},
    Section{"table", "The embedding as a table whose rows are on the devices (docs/rows.md)."},
    Section{"ranks", "Several processes that train one model together (docs/ranks.md)."},
    Section{"teacher", "The model that `smartinf distill` learns from (docs/distill.md)."},
    Section{"student", "The model that it makes."},
    Section{"distill", "How the student's layers learn."},
    Section{"remote",
            "Devices of other machines: how this one shows who it is, and how long it waits "
            "(docs/remote.md)."},
    Section{"device",
            "Where the state is stored: one [[device]] table for each drive. "
            "Without any, the state is stored in the run's folder."},
};

constexpr auto kKeys = std::to_array<Key>({
    SI_KEY("model.from", &r.options.model.from,
           "folder of the model that is fine-tuned, as Hugging Face's save_pretrained() writes it "
           "(docs/models.md); empty: a new model of the sizes below"),
    SI_KEY("model.init", base::by_name(r.options.model.init),
           "first weights of a model from a folder: \"weights\": the folder's; \"random\": random "
           "ones, and only the shape and the tokenizer are the folder's"),
    SI_KEY("model.ignored_keys", &r.options.model.ignored_keys,
           "keys of config.json that are refused and that you know to change nothing"),
    SI_KEY("model.layers", &r.options.model.layers, "transformer layers"),
    SI_KEY("model.width", &r.options.model.width, "width of the residual stream"),
    SI_KEY("model.heads", &r.options.model.heads, "query heads; must divide width"),
    SI_KEY("model.kv_heads", &r.options.model.kv_heads, "key and value heads; 0: as many as heads"),
    SI_KEY("model.mlp_width", &r.options.model.mlp_width,
           "inner width of the feed-forward part; 0: 8/3 of width, rounded up to a multiple of 64"),
    SI_KEY("model.vocabulary", &r.options.model.vocabulary,
           "number of tokens that the model knows; 0: as many as the data needs"),
    SI_KEY("model.rope_base", &r.options.model.rope_base,
           "base of the rotary positions' wavelengths"),
    SI_KEY("model.norm_eps", &r.options.model.norm_eps,
           "number added to the mean square in RMSNorm"),
    SI_KEY("model.init_std", &r.options.model.init_std,
           "standard deviation of the initial weights"),
    SI_KEY("model.tied_head", &r.options.model.tied_head,
           "whether the output head is the embedding"),

    SI_KEY("lora.rank", &r.options.lora.rank, "rank of the adapters; 0: all weights are trained"),
    SI_KEY("lora.alpha", &r.options.lora.alpha,
           "number that, divided by rank, multiplies what an adapter adds"),
    SI_KEY(
        "lora.targets", &r.options.lora.targets,
        "matrices that get an adapter, by the ends of their names, e.g. [\"q_proj\", \"v_proj\"]; "
        "\"all-linear\": all matrices of layers but experts and routers"),

    SI_KEY("data.paths", &r.options.data.paths,
           "text files, folders of them, token files (.safetensors, .bin; docs/data.md), or "
           "\"python-stdlib\", the standard library of the installed Python"),
    SI_KEY("data.validation_paths", &r.options.data.validation_paths,
           "data held out for validation; empty: a share of paths"),
    SI_KEY("data.validation_share", &r.options.data.validation_share,
           "share held out when validation_paths is empty"),
    SI_KEY("data.evaluation", &r.options.data.evaluation,
           "data that every validation evaluates as well, each \"NAME = PATH\"; paths of one name "
           "belong together"),
    SI_KEY("data.suffixes", &r.options.data.suffixes,
           "suffixes of the files taken from folders, e.g. [\".py\"]; empty: all text"),
    SI_KEY("data.tokenizer", &r.options.data.tokenizer,
           "tokenizer.json that the token files were made with, for export; empty: tokens are "
           "bytes"),
    SI_KEY("data.sequence", &r.options.data.sequence, "tokens in one sequence"),
    SI_KEY("data.seed", &r.options.data.seed, "seed of the order of the sequences"),

    SI_KEY("train.run", &r.options.train.run,
           "folder of the run: recipe, log and state; empty: runs/ and the recipe's name"),
    SI_KEY(
        "train.precision", base::by_name(r.options.train.precision),
        "type of weights and compute; optimizer.format is the type of the state. \"auto\": when a "
        "run begins, bf16 on a GPU and on processors with instructions for it, else f32, which "
        "is several times as fast there; the run keeps it"),
    SI_KEY("train.steps", &r.options.train.steps,
           "optimizer steps of the whole run; 0: what epochs says"),
    SI_KEY("train.epochs", &r.options.train.epochs,
           "times that the run goes through the data, in place of steps; 0: what steps says"),
    SI_KEY(
        "train.log_every", &r.options.train.log_every,
        "steps between two printed lines; 1: every step, or on a terminal a view of the last one. "
        "The run's log.jsonl has every step"),
    SI_KEY("train.micro_batch", &r.options.train.micro_batch, "sequences in one forward"),
    SI_KEY("train.accumulation", &r.options.train.accumulation,
           "micro batches in one step, of all ranks together"),
    SI_KEY("train.lr", &r.options.train.lr, "highest learning rate, after the warm-up"),
    SI_KEY("train.schedule", base::by_name(r.options.train.schedule),
           "course of lr after the warm-up: \"cosine\" and \"linear\": down to lr_floor with the "
           "last step; \"constant\": no change; \"warmup-stable-decay\": no change until the "
           "last steps (decay_share), then linear down to lr_floor"),
    SI_KEY("train.lr_floor", &r.options.train.lr_floor, "share of lr that the schedule ends at"),
    SI_KEY("train.decay_share", &r.options.train.decay_share,
           "share of all steps in which \"warmup-stable-decay\" decays"),
    SI_KEY("train.warmup_steps", &r.options.train.warmup_steps, "steps of linear warm-up"),
    SI_KEY("train.weight_decay", &r.options.train.weight_decay, "weight decay, on matrices only"),
    SI_KEY("train.lr_factors", &r.options.train.lr_factors,
           "factors of lr for parameters by name, each \"PATTERN = NUMBER\"; of several that match "
           "the last one counts. \"model.embed_tokens.weight = 0.5\" halves lr for that parameter; "
           "* stands for any text"),
    SI_KEY(
        "train.weight_decays", &r.options.train.weight_decays,
        "weight decay of parameters by name, in place of weight_decay: \"model.embed_tokens.weight "
        "= 0\". The patterns of a run cannot change when it is resumed; the numbers can"),
    SI_KEY("train.clip_norm", &r.options.train.clip_norm,
           "largest global L2 norm of the gradient; 0: no clipping"),
    SI_KEY("train.skips_max", &r.options.train.skips_max,
           "steps in a row that may be skipped because a gradient is not finite; one more ends the "
           "run"),
    SI_KEY("train.seed", &r.options.train.seed, "seed of the initial weights and of samples"),
    SI_KEY("train.threads", &r.options.train.threads,
           "threads that compute the model; 0: all cores. Another number of threads gives other "
           "losses in the last bits"),
    SI_KEY("train.accelerator", &r.options.train.accelerator,
           "processor that computes the model: \"auto\", \"cpu\" or \"cuda\""),
    SI_KEY("train.validate_every", &r.options.train.validate_every,
           "steps between validations; 0: only at the end"),
    SI_KEY("train.validate_at_start", &r.options.train.validate_at_start,
           "whether to validate before the first step as well"),
    SI_KEY("train.validation_batches", &r.options.train.validation_batches,
           "micro batches in one validation"),
    SI_KEY("train.keep_best", &r.options.train.keep_best,
           "whether the state with the lowest validation loss so far is kept as the checkpoint "
           "\"best\" in checkpoint.folder"),
    SI_KEY("train.save_every", &r.options.train.save_every,
           "steps between writes of the state with optimizer.where = \"memory\""),
    SI_KEY("train.sample_prompts", &r.options.train.sample_prompts,
           "texts that the model continues at each validation, as samples; empty: none"),
    SI_KEY("train.sample_tokens", &r.options.train.sample_tokens,
           "new tokens of each sample, which with its prompt has at most data.sequence; 0: none"),
    SI_KEY("train.sample_temperature", &r.options.train.sample_temperature,
           "temperature of these samples; 0: always the likeliest token"),
    SI_KEY(
        "train.trace", &r.options.train.trace,
        "file for a trace that Perfetto opens, of rank 0 or, with \"{rank}\" in it, one for each "
        "rank; empty: none"),
    SI_KEY("train.layer_stats_every", &r.options.train.layer_stats_every,
           "steps between two rows of the log with norms of every layer's gradient, weights and "
           "update (docs/metrics.md); each row reads all weights twice; 0: none"),

    SI_KEY("checkpoint.every", &r.options.checkpoint.every, "steps between copies; 0: none"),
    SI_KEY("checkpoint.keep", &r.options.checkpoint.keep,
           "newest copies that are kept, older ones of this run are deleted; 0: all"),
    SI_KEY("checkpoint.folder", &r.options.checkpoint.folder,
           "folder of the copies (smartinf checkpoint --out); empty: checkpoints in the run's "
           "folder. On the devices' own file "
           "system, if it is btrfs or xfs, a copy takes no time and shares the devices' blocks"),

    SI_KEY("optimizer.where", base::by_name(r.options.train.where),
           "place of the update: \"device\": the device that has the state; \"host\": the host, so "
           "that state crosses the host link both ways; \"memory\": torch's own AdamW in memory"),
    SI_KEY(
        "optimizer.overlap", base::by_name(r.options.train.overlap),
        "computation that runs at the same time as the update: \"late\": the next forward, each "
        "layer of which waits for its new weights; \"early\": backward as well, on the assumption "
        "that the gradient will not be clipped (train.clip_norm); \"none\": nothing; \"auto\": "
        "\"early\" in steps where the forward had to wait and the assumption is likely to hold, "
        "else \"late\", and \"none\" if optimizer.where is \"memory\". Weights and losses have "
        "the same bits in all cases"),
    SI_KEY("optimizer.rule", base::by_name(r.updater.rule.rule), "update rule"),
    SI_KEY("optimizer.beta1", &r.updater.rule.beta1, "beta1 of adam, adamw, lion; momentum of sgd"),
    SI_KEY("optimizer.beta2", &r.updater.rule.beta2, "beta2 of adam, adamw, lion"),
    SI_KEY("optimizer.eps", &r.updater.rule.eps, "eps of adam, adamw, adagrad"),
    SI_KEY("optimizer.dampening", &r.updater.rule.dampening, "dampening of sgd"),
    SI_KEY("optimizer.nesterov", &r.updater.rule.nesterov, "whether sgd takes Nesterov momentum"),
    SI_KEY("optimizer.maximize", &r.updater.rule.maximize,
           "whether the loss is maximized instead of minimized"),
    SI_KEY("optimizer.lr_decay", &r.updater.rule.lr_decay, "decay of lr in adagrad"),
    SI_KEY("optimizer.initial_accumulator_value", &r.updater.rule.initial_accumulator_value,
           "first value of adagrad's sums"),
    SI_KEY("optimizer.format", base::by_name(r.updater.format.moments),
           "format of momentum and variance"),
    SI_KEY("optimizer.master", base::by_name(r.updater.format.master),
           "format of the master weights; \"m24\": the upper 24 bits of an f32"),
    SI_KEY("optimizer.gradient_type", base::by_name(r.updater.gradient_type),
           "type of gradients on the host link; default: that of train.precision"),
    SI_KEY("optimizer.seed", &r.updater.seed, "seed of stochastic rounding (all formats but f32)"),

    SI_KEY("compress.density", &r.updater.compress.density,
           "share of a gradient's elements that are sent, the largest of each block of 65536, e.g. "
           "0.08; 0: gradients are sent dense"),
    SI_KEY("compress.values", base::by_name(r.updater.compress.values),
           "encoding of a sent element; \"sign\": its sign, and one magnitude for each block; "
           "default: \"sign\", but \"bf16\" without error feedback"),
    SI_KEY("compress.error_feedback", &r.updater.compress.error_feedback,
           "whether the part of a gradient that is not sent (the residual) is kept in host memory "
           "and added to the next gradient; false: it is lost"),
    SI_KEY("compress.stages", compressed_stages_of(r.updater.compress.stages),
           "with several ranks (docs/ranks.md): so many stages, from the first on, whose replicas "
           "send each other compressed gradients; \"auto\": as few as make the step as short as "
           "any number would, on the links of ranks.cluster"),
    SI_KEY("compress.pipeline", base::by_name(r.options.ranks.compression.form),
           "form of the gradients that go back between stages (docs/pipeline.md): \"none\": whole; "
           "\"lowrank\": a product of two narrow matrices; \"int8\", \"int4\": integers. The "
           "losses are then those of no run without it"),
    SI_KEY("compress.pipeline_rank", &r.options.ranks.compression.rank,
           "columns of the matrices of compress.pipeline = \"lowrank\""),
    SI_KEY("compress.pipeline_when", base::by_name(r.options.ranks.compression.when),
           "gradients that compress.pipeline is for: \"epilogue\": the last ones of a step, for "
           "which the stages before wait; \"exposed\": as few of the last ones as make the step "
           "as short as all would, on the links of ranks.cluster; \"always\": all"),
    SI_KEY("compress.pipeline_forward", base::by_name(r.options.ranks.compression.forward),
           "form of the activations that go forward between stages in training: \"none\": whole; "
           "\"int8\": integers. The losses are then those of no run without it"),
    SI_KEY("compress.pipeline_feedback", base::by_name(r.options.ranks.compression.feedback),
           "treatment of what compress.pipeline loses: \"step\": it is added to the next gradient "
           "of the step; \"none\": nothing"),
    SI_KEY("compress.residual_every", &r.updater.compress.residual_every,
           "steps between writes of the residual to the devices, 2 bytes a parameter; 1: every "
           "step, so that a crash loses none of it; 0: never"),
    SI_KEY("compress.warmup_steps", &r.updater.compress.warmup_steps,
           "steps in which the density falls from 0.25 to compress.density"),

    SI_KEY("engine.schedule", base::by_name(r.updater.schedule, plan::engine_schedule_names()),
           "order of reads, updates and writes on a device"),
    SI_KEY("engine.memory_budget", base::ByteCount{&r.updater.memory_budget_bytes},
           "memory of all devices' buffers together; gradients and weights come on top"),
    SI_KEY("engine.gradient_budget", base::ByteCount{&r.updater.gradient_budget_bytes},
           "memory for gradients; beyond it they are spilled to the devices"),
    SI_KEY("engine.subgroup_elements", &r.updater.subgroup_elements,
           "elements read, updated and written as one subgroup; 0: chosen from the memory budget"),
    SI_KEY("engine.durability", base::by_name(r.updater.durability),
           "durability of the state: \"step\": every committed step survives power loss; \"none\": "
           "the state takes half the space, and a crash loses it"),
    SI_KEY("engine.checksums", &r.updater.checksums,
           "whether every block has a checksum, checked at every read"),
    SI_KEY("engine.ring", base::by_name(r.updater.ring),
           "kind of I/O: \"auto\": io_uring where it works, else a pool of threads"),
    SI_KEY("engine.io_size", base::ByteCount{&r.updater.io_bytes},
           "size of one transfer; 0: measured at first use and stored on the device"),
    SI_KEY("engine.io_depth", &r.updater.io_depth,
           "transfers in flight in each direction; 0: measured at first use and stored on the "
           "device"),
    SI_KEY("engine.pin_threads", &r.updater.pin_threads,
           "whether the threads of each of several devices stay on cores of their own, near its "
           "drive"),
    SI_KEY("engine.host_link_up", base::ByteCount{&r.updater.host_link.up_bytes_per_s},
           "emulation: bytes per second from all devices together to the host; 0: no limit"),
    SI_KEY("engine.host_link_down", base::ByteCount{&r.updater.host_link.down_bytes_per_s},
           "emulation: bytes per second from the host to all devices together; 0: no limit"),
    SI_KEY("engine.host_link_shared", &r.updater.host_link.shared_budget,
           "emulation: whether both directions share the link's time"),
    SI_KEY("engine.host_link_latency_us", &r.updater.host_link.latency_us,
           "emulation: microseconds added to every transfer"),

    SI_KEY("memory.host", base::ByteCount{&r.options.memory.host_bytes},
           "size that the process may have in the host's memory, with torch and all; weights, "
           "gradients and activations that do not fit are stored on the devices and pass through. "
           "0: what is free at the start"),
    SI_KEY("memory.accelerator", base::ByteCount{&r.options.memory.accelerator_bytes},
           "size that may be used of a GPU's memory; 0: what is free at the start"),
    SI_KEY(
        "memory.activations", base::by_name(r.options.memory.activations),
        "activations that stay between forward and backward: \"keep\": all that backward needs, "
        "in memory; "
        "\"recompute\": the input of each group of layers, and backward computes the rest "
        "again; \"offload\": all that backward needs, on the devices; \"auto\": \"keep\" if "
        "there is memory for it, else \"recompute\", and as much of \"offload\" as the first steps "
        "show to be faster. Inputs that do not fit are stored on the devices"),
    SI_KEY("memory.state_cache", base::ByteCount{&r.updater.state_cache_bytes},
           "size of the part of the state that is kept in host memory as well, and is not read "
           "from the drives again. Every step still writes it; with engine.durability = \"none\" "
           "it is written only at checkpoints and at the end"),

    SI_KEY("table.embedding", base::by_name(r.options.embedding),
           "rule of the embedding's rows, of which a step reads and updates those of its tokens "
           "alone; the head must not be tied. \"adamw\": that of optimizer.rule = \"adamw\" "
           "without weight decay; \"none\": the embedding is a parameter as any other"),
    SI_KEY("table.memory", base::ByteCount{&r.updater.table_memory_bytes},
           "memory of all devices together for where rows are and for those that are cached"),
    SI_KEY("table.log", base::ByteCount{&r.updater.table_log_bytes},
           "room on the drives for new rows on their way to their places; 0: chosen"),

    SI_KEY(
        "ranks.order", base::by_name(r.options.ranks.order),
        "order in which the gradients of a step's micro batches are added up: \"fixed\": one that "
        "gives the same bits with any number of ranks; \"auto\": the same with several ranks, and "
        "in one process one after the other, which takes less memory"),
    SI_KEY(
        "ranks.pipeline", stages_of(r.options.ranks.pipeline),
        "stages that the layers are divided into (docs/pipeline.md): each rank has the layers and "
        "the state of one stage, and ranks / stages of them share the micro batches; 1: every "
        "rank computes the whole model; \"auto\": what smartinf plan finds for ranks.cluster"),
    SI_KEY(
        "ranks.cluster", &r.options.ranks.cluster,
        "file of the boxes and links by which layers are divided, and ranks.pipeline = \"auto\", "
        "compress.pipeline_when = \"exposed\" and compress.stages = \"auto\" choose "
        "(docs/cluster.md)"),
    SI_KEY("ranks.chunks", &r.options.ranks.chunks,
           "parts of each stage's layers, which stages compute by turns: weights of several come "
           "from the devices as far as memory does not suffice; 1: all weights of a stage stay in "
           "memory; 0: 1 if there is memory for it, else the fewest for which there is"),
    SI_KEY("ranks.split", &r.options.ranks.split,
           "layers of each stage, \"9, 8, 8, 7\"; empty: stages of equal computing, as far as all "
           "have the memory, or what smartinf plan finds for ranks.cluster, whose boxes may not be "
           "alike"),
    SI_KEY("ranks.tied", base::by_name(r.options.ranks.tied),
           "stage that computes a head which is the embedding's matrix: \"sync\": the last one, "
           "which has a copy; \"fold\": the first one, to which the last one sends its hidden "
           "states; \"auto\": whichever sends fewer bytes in a step, \"sync\" in chunks"),
    SI_KEY("ranks.tensor", &r.options.ranks.tensor,
           "ranks that divide a matrix among them: 1, and nothing else is possible"),
    SI_KEY("ranks.timeout", &r.options.ranks.timeout_s,
           "seconds that the ranks wait for a rank that ended, stands still or does not come; then "
           "all others end and name it"),

    SI_KEY("teacher.from", &r.distill.teacher,
           "folder of the teacher, as Hugging Face's save_pretrained() writes it"),
    SI_KEY("student.from", &r.distill.student,
           "folder of the student: as many layers of the same width, which may differ inside; "
           "empty: made of the teacher"),
    SI_KEY("student.prune", &r.distill.prune,
           "shares of each layer of the teacher that stay, \"ffn=0.5,heads=0.75\": channels of the "
           "feed-forward part, and groups of heads"),
    SI_KEY("student.quantise", &r.distill.quantise,
           "rounding of the teacher's layers' matrices to 4 bits, \"int4\" or \"int4,group=64\": "
           "so many neighbouring weights of a row share a scale, 128 unless given; what is trained "
           "is which weights are rounded up"),
    SI_KEY("distill.loss", base::by_name(r.distill.loss),
           "loss of a layer's output, a mean over tokens: \"mse\": squared distance from the "
           "teacher's over the teacher's square; \"cosine\": 1 less the cosine"),
    SI_KEY("distill.inputs", base::by_name(r.distill.inputs),
           "inputs of a layer in training: \"teacher\": the teacher's, so layers are independent; "
           "\"student\": what the student's trained layers before it make, which needs memory for "
           "the activations of all steps"),
    SI_KEY("distill.top_k", &r.distill.top_k,
           "most likely tokens of the teacher whose chances the last layer learns, with all others "
           "as one; 0: it learns the teacher's output as the other layers do"),
    SI_KEY("distill.whole_steps", &r.distill.whole_steps,
           "steps in which the student then learns these chances as a whole, from logits that are "
           "kept in the run's folder; 0: none"),
    SI_KEY("distill.stages", &r.distill.stages,
           "layers of ranks, \"3,2x2\": three of the first rank, two that two ranks share, each "
           "with some micro batches of a step; or the folder of a run that has made some steps: "
           "as smartinf plan distill divides by its times; empty: each rank has layers of its own, "
           "by what they compute"),

    SI_KEY("remote.certificate", &r.updater.remote.certificate,
           "file of this client's certificate (PEM)"),
    SI_KEY("remote.key", &r.updater.remote.key, "file of this client's private key (PEM)"),
    SI_KEY("remote.ca", &r.updater.remote.ca,
           "file of the certificate of the authority that signed the servers' certificates (PEM)"),
    SI_KEY("remote.reconnect_seconds", &r.updater.remote.reconnect_seconds,
           "seconds for which a lost connection is made again before the step is given up"),
    SI_KEY("remote.deadline_seconds", &r.updater.remote.deadline_seconds,
           "seconds that a server which owes an answer may be silent"),
    SI_KEY("remote.restart_seconds", &r.restart_seconds,
           "seconds for which `smartinf train` tries to open a lost device again, and goes on "
           "from the committed step; 0: it ends with the error. Of several ranks it always ends "
           "(torchrun --max-restarts starts them again)"),
    SI_KEY("remote.window", base::ByteCount{&r.updater.remote.window_bytes},
           "bytes on their way to one device; more make up for a slow network"),

    SI_DEVICE_KEY("device.path", &r.updater.devices[i].path,
                  "directory or block device, or grpc://HOST:PORT/NAME of another machine; with "
                  "\"{rank}\" in it there is one such device for "
                  "each rank, with its number in the path"),
    SI_DEVICE_KEY("device.rank", rank_of(r.updater.devices[i].rank),
                  "number of the rank that drives the device, from 0; \"auto\": the devices are "
                  "shared out among the ranks in their order"),
    SI_DEVICE_KEY("device.name", &r.updater.devices[i].name, "name in messages; empty: the path"),
    SI_DEVICE_KEY("device.threads", &r.updater.devices[i].threads,
                  "threads that update; 0: the cores are divided among the devices"),
    SI_DEVICE_KEY(
        "device.processor", &r.updater.devices[i].processor,
        "processor of the updates: \"cpu\": threads of this machine; \"opencl\": the first OpenCL "
        "device; \"opencl:DEVICE\": the one with that number or text in its name "
        "(smartinf doctor lists them)"),
    SI_DEVICE_KEY("device.bandwidth",
                  (base::Number{&r.updater.devices[i].bandwidth, 0, 1e18, "such as 2 or \"3GB\""}),
                  "speed relative to the other devices, for placement; 0: measured at first use"),
    SI_DEVICE_KEY("device.capacity", base::ByteCount{&r.updater.devices[i].capacity_bytes},
                  "largest number of bytes to use; 0: all free space"),
    SI_DEVICE_KEY("device.rated_endurance",
                  base::ByteCount{&r.updater.devices[i].rated_endurance_bytes},
                  "bytes that may be written to the drive in its lifetime, from its data sheet "
                  "(600TB); 0: not known"),
    SI_DEVICE_KEY("device.internal_read",
                  base::ByteCount{&r.updater.devices[i].internal_link.up_bytes_per_s},
                  "emulation: bytes per second from the store to the processor; 0: no limit"),
    SI_DEVICE_KEY("device.internal_write",
                  base::ByteCount{&r.updater.devices[i].internal_link.down_bytes_per_s},
                  "emulation: bytes per second from the processor to the store; 0: no limit"),
    SI_DEVICE_KEY("device.internal_shared", &r.updater.devices[i].internal_link.shared_budget,
                  "emulation: whether reads and writes share the drive's time, as in a real drive"),
    SI_DEVICE_KEY("device.internal_latency_us", &r.updater.devices[i].internal_link.latency_us,
                  "emulation: microseconds added to every transfer"),
});

#undef SI_KEY
#undef SI_DEVICE_KEY

}  // namespace

std::span<const Section> sections() { return kSections; }
std::span<const Key> keys() { return kKeys; }

std::string numbered_key(std::string_view key, size_t device) {
  if (section_of(key) != kDeviceSection) return std::string(key);
  return fmt::format("device.{}.{}", device, name_of(key));
}

}  // namespace smartinf::config
