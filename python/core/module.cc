// smartinf._core: the engine's Updater for Python. Tensors are addresses of host memory here, so
// the module needs neither torch nor numpy; smartinf/optimizers.py keeps them alive.
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "smartinf/base/unified_memory.h"
#include "smartinf/engine/checkpoint.h"
#include "smartinf/engine/early_update_pays.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/memory.h"
#include "smartinf/engine/step_metadata.h"
#include "smartinf/plan/slots.h"
#include "smartinf/storage/store.h"

#include "python/core/cache.h"
#include "python/core/checkpoint.h"
#include "python/core/checksums.h"
#include "python/core/errors.h"
#include "python/core/layer_window.h"
#include "python/core/ranks.h"
#include "python/core/remarks.h"
#include "python/core/spool.h"
#include "python/core/updater.h"
#include "python/core/weight_source.h"
#include "python/core/weights.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using smartinf::engine::RanksCheckpoint;
using smartinf::engine::StripedWeights;
using smartinf::python::PyCache;
using smartinf::python::PyCheckpoint;
using smartinf::python::PyLayerWindow;
using smartinf::python::PyRanks;
using smartinf::python::PySpool;
using smartinf::python::PyUpdater;
using smartinf::python::PyWeights;
using smartinf::python::PyWeightSource;

smartinf::engine::DeviceSources sources_at(const std::vector<std::string>& paths,
                                           const nb::dict& remote) {
  return smartinf::engine::sources_at(paths, smartinf::storage::RingKind::kAuto,
                                      smartinf::python::remote_options(remote));
}

void define_functions(nb::module_& module) {
  module.def(
      "erase",
      [](const std::string& path, const nb::dict& remote) {
        const auto sources = sources_at({path}, remote);
        const nb::gil_scoped_release released;
        const auto state = smartinf::python::take(sources.front()->peek());
        if (state) smartinf::python::check(sources.front()->erase());
      },
      "path"_a, "remote"_a = nb::dict(),
      "Removes the state that a device holds, if there is any. Not while it is open.");
  module.def(
      "peek",
      [](const std::string& path,
         const nb::dict& remote) -> std::optional<std::tuple<bool, uint64_t, uint64_t>> {
        const auto sources = sources_at({path}, remote);
        const nb::gil_scoped_release released;
        const auto state = smartinf::python::take(sources.front()->peek());
        if (!state) return std::nullopt;
        return std::tuple(state->initialized, state->committed_step, state->prepared_step);
      },
      "path"_a, "remote"_a = nb::dict(),
      "(initialized, committed step, prepared step) of a device without opening it; None: empty.");
  module.def(
      "stored_client_metadata",
      [](const std::vector<std::string>& paths, const nb::dict& remote) {
        const auto sources = sources_at(paths, remote);
        const nb::gil_scoped_release released;
        const auto run = smartinf::python::take(
            smartinf::engine::open_stored_run(sources, smartinf::storage::ReaderLock::kTake));
        return smartinf::engine::split_metadata(run.client_metadata).client_metadata;
      },
      "paths"_a, "remote"_a = nb::dict(),
      "The text that was given with the step that devices hold. Not while they are open.");
  module.def(
      "stored_state",
      [](const std::vector<std::string>& paths, const nb::dict& remote)
          -> std::optional<std::tuple<std::vector<std::pair<std::string, std::vector<uint64_t>>>,
                                      bool, uint64_t>> {
        const auto sources = sources_at(paths, remote);
        const nb::gil_scoped_release released;
        auto stored = smartinf::python::stored_state(sources);
        if (!stored) return std::nullopt;
        return std::tuple(std::move(stored->parameters), stored->gradient_room,
                          stored->subgroup_elements);
      },
      "paths"_a, "remote"_a = nb::dict(),
      "(parameters, [(name, shape)] in their order; whether there is room for gradients that do "
      "not fit in memory; elements of the largest subgroup) of the first device with a state; "
      "None: there is none that can be read, and an Updater says why.");
  module.def(
      "available_memory_bytes", &smartinf::engine::available_memory_bytes,
      "Memory of this machine that is free, within the limits of the process's control group.");
  module.def("early_update_pays", &smartinf::engine::early_update_pays, "norm_before"_a,
             "norm_max"_a, "late_exposed"_a, "last"_a,
             "Whether overlap 'auto' makes the next update an early one.");
  module.def("checksums", &smartinf::python::checksums, "addresses"_a, "sizes"_a,
             nb::call_guard<nb::gil_scoped_release>(),
             "Of each range of bytes in memory one number that its content decides.");
  module.def("clip_factor", &smartinf::engine::clip_factor, "norm"_a, "norm_max"_a,
             "What gradients are multiplied by so that their norm is at most norm_max (0: any).");
  module.def("compress_options", &smartinf::python::compress_options, "given"_a,
             "The option 'compress' of an Updater, complete.");
  module.def("take_remarks", &smartinf::python::take_remarks,
             "The core's log messages since the last call: [(level, text)].");
}

void define_checkpoint(nb::module_& module) {
  nb::class_<PyCheckpoint>(module, "Checkpoint",
                           "A checkpoint's elements as numbers, every block checked. Its parts are "
                           "those of the ranks that wrote it, or one.")
      .def(nb::init<const std::string&>(), "path"_a)
      .def("trainer", &PyCheckpoint::trainer, "The text that was saved with it, or ''.")
      .def("rule", &PyCheckpoint::rule)
      .def("planes", &PyCheckpoint::planes, "Names, in the order of read()'s numbers.")
      .def("parts", &PyCheckpoint::parts,
           "[{run, step, client metadata, count (elements), ranges [(name, shape)], residual "
           "(whether that "
           "plane is of this step), ahead [(lr, variance's bias, eps)] by range, or none}]")
      .def("read", &PyCheckpoint::read, "part"_a, "plane"_a, "first"_a, "count"_a, "address"_a,
           "Elements of a part's space as f32 to host memory.")
      .def("has_tables", [](const PyCheckpoint& one) { return one.tables() != nullptr; })
      .def("check", &PyCheckpoint::check, "Reads everything, for its checksums only.");
}

void define_ranks_checkpoint(nb::module_& module) {
  nb::class_<RanksCheckpoint>(module, "RanksCheckpoint",
                              "A checkpoint of several ranks, as rank 0 makes it: each saves its "
                              "own at rank_folder(). Deleted with this object unless finished.")
      .def_static(
          "begin",
          [](const std::string& path, bool replace) {
            return smartinf::python::take(
                RanksCheckpoint::begin(path, replace, smartinf::storage::make_run_id()));
          },
          "path"_a, "replace"_a)
      .def("rank_folder",
           [](const RanksCheckpoint& checkpoint, size_t rank) {
             return smartinf::engine::rank_folder(checkpoint.folder(), rank);
           })
      .def(
          "finish",
          [](RanksCheckpoint& checkpoint, size_t ranks, const std::string& trainer) {
            const nb::gil_scoped_release released;
            smartinf::python::check(checkpoint.finish(ranks, trainer));
          },
          "ranks"_a, "trainer"_a);
}

void define_ranks(nb::module_& module) {
  nb::class_<PyRanks>(module, "Ranks",
                      "Several ranks, for the option 'ranks' of an Updater: each opens one of its "
                      "own, all make the same calls, and a step is committed on all or on none.")
      .def(nb::init<uint32_t, uint32_t, nb::object>(), "rank"_a, "world"_a, "calls"_a,
           "calls: a smartinf.rank_calls.RankCalls. Collective, as is all_ok().")
      .def("all_ok", &PyRanks::all_ok, "call"_a, "failure"_a.none(),
           "Raises the first rank's failure (a smartinf.Error, or None) on all of them.");
}

void define_spool(nb::module_& module) {
  nb::class_<PySpool>(
      module, "Spool",
      "Bytes that leave memory and come back within this process. Addresses and sizes are "
      "multiples of 4096. Memory of a put stays as it is until wait() or drop() has returned, that "
      "of a get until wait() has. Any number may be under way.")
      .def(
          "__init__",
          [](PySpool* spool, const nb::dict& options) {
            new (spool) PySpool(smartinf::python::updater_options(options));
          },
          "options"_a,
          "Over directories in which no state lies: options['devices'] and ['spool_bytes'] as for "
          "an Updater. Nothing is left there.")
      .def("put", &PySpool::put, "address"_a, "bytes"_a, "Starts to write; returns a ticket.")
      .def("settled", &PySpool::settled, "ticket"_a, "Whether wait() would return at once.")
      .def("wait", &PySpool::wait, "ticket"_a,
           "For its put, or for the get that was started last; raises what went wrong.")
      .def("start_get", &PySpool::start_get, "ticket"_a, "address"_a,
           "Starts to read all of it. A put that was not waited for is copied from its memory.")
      .def("drop", &PySpool::drop, "ticket"_a, "Waits for what is under way, and frees its room.")
      .def("counts", &PySpool::counts, "Bytes so far: put, got, copied; used, used_max.")
      .def("close", nb::overload_cast<nb::object>(&PySpool::close), "memory"_a = nb::none(),
           "Drops all tickets. memory: an object that holds the memory of puts and gets; it is "
           "kept for good where a device has failed and may still use it.");
}

void define_cache(nb::module_& module) {
  nb::class_<PyCache>(
      module, "Cache",
      "Keys and values of sequences that are continued, in memory or on devices, which attend to "
      "them. Addresses are of host memory that stays valid during the call.")
      .def(nb::init<const nb::dict&, const std::vector<uint32_t>&, uint32_t, uint32_t, uint32_t,
                    float, const std::string&, uint64_t, uint32_t>(),
           "options"_a, "windows"_a, "heads"_a, "kv_heads"_a, "head_width"_a, "softcap"_a,
           "format"_a, "memory_bytes"_a, "threads"_a,
           "options['devices'], ['remote'] as for an Updater; no devices: in memory. windows: of "
           "each layer, the last tokens that a query sees; 0: all. memory_bytes: in memory for "
           "keys and values, else for reading and writing. threads: that fold in memory.")
      .def("sequence_bytes", &PyCache::sequence_bytes, "tokens"_a,
           "Bytes that a sequence with room for so many tokens takes in memory.")
      .def("open", &PyCache::open, "id"_a, "tokens_max"_a, "A sequence with room for its tokens.")
      .def("drop", &PyCache::drop, "id"_a, "Its room is free. Nothing where it is not open.")
      .def("append", &PyCache::append, "layer"_a, "runs"_a, "type"_a, "keys"_a, "values"_a,
           "runs: (sequence, first, count), tokens of keys and values, [tokens][kv_heads][width].")
      .def("attend", &PyCache::attend, "layer"_a, "ids"_a, "queries"_a, "out"_a,
           "One query for each sequence, scaled, over its tokens: f32 [ids][heads][width], both.")
      .def("traffic", &PyCache::traffic, "Bytes that drives have read and written.")
      .def("close", &PyCache::close, "Frees memory and devices, where nothing is left of it.");
}

void define_state(nb::class_<PyUpdater, PyWeightSource>& updater) {
  updater
      .def(
          nb::init<const nb::dict&, const std::vector<std::string>&,
                   const std::vector<std::vector<uint64_t>>&>(),
          "options"_a, "names"_a, "shapes"_a,
          "Opens what is on the devices, or creates it when they are empty. Each of the names is a "
          "range of the parameter space, and a group of its own.")
      .def("fresh", &PyUpdater::fresh)
      .def("client_metadata", &PyUpdater::client_metadata,
           "The text given with the committed step.")
      .def("initialize", &PyUpdater::initialize, "provide"_a, "client_metadata"_a,
           "Fresh only: writes the master weights. provide(range) gives (address, type) of a "
           "range's "
           "values; they stay valid until it is called again.")
      .def(
          "read_state", &PyUpdater::read_state, "planes"_a, "visit"_a,
          "visit(first, count, views) for pieces in ascending order; views holds an f32 memoryview "
          "for each plane of the mask, else None, valid during the call.")
      .def("edit_state", &PyUpdater::edit_state, "edit"_a.none(), "client_metadata"_a,
           "residual"_a = 0, "ahead"_a = std::vector<std::array<float, 3>>(),
           "Like read_state over all planes, with views that may be written; what edit(first, "
           "count, views) returns true for is written back. All becomes real at once, as a step. "
           "edit None: no plane changes. residual: address of the new residual, bf16 in the order "
           "of the space; 0: unchanged. ahead: step_ahead() that belongs to it; empty: unchanged.")
      .def("step_ahead", &PyUpdater::step_ahead,
           "(lr, bias correction, eps) by group, with which step-ahead moves the stored weights; "
           "empty without step-ahead.")
      .def("residual", &PyUpdater::residual,
           "Address of the residual, bf16 in the order of the space, valid until state changes; 0 "
           "without error feedback.")
      .def("compression", &PyUpdater::compression, "Counts of what the last update sent.")
      .def("load_weights", &PyUpdater::load_weights, "type"_a, "address"_a, "kept"_a = nb::none(),
           "Master weights, cast, to one flat array in the order of the space. kept: only the "
           "subgroups of these spans, [(first, count)]; the array has room for them whole.")
      .def("save_checkpoint", &PyUpdater::save_checkpoint, "path"_a, "replace"_a, "trainer"_a,
           "progress"_a,
           "Copies the committed state into a folder of its own, durably. trainer: text kept with "
           "it. progress(bytes done, bytes in all).")
      .def("traffic", &PyUpdater::traffic,
           "Bytes so far: host_up, host_down (host link), read, written (devices), each by kind.")
      .def("memory_bytes", &PyUpdater::memory_bytes)
      .def("state_cache_bytes", &PyUpdater::state_cache_bytes)
      .def("gradient_memory_bytes", &PyUpdater::gradient_memory_bytes)
      .def("describe_devices", &PyUpdater::describe_devices)
      .def("spool", &PyUpdater::spool, "Of the option spool_bytes, or None; closed with this.")
      .def("close", &PyUpdater::close, "Completes a started commit and releases the devices.");
}

void define_step(nb::class_<PyUpdater, PyWeightSource>& updater) {
  updater.def("begin_step", &PyUpdater::begin_step)
      .def("put_gradients", &PyUpdater::put_gradients, "ranges"_a, "addresses"_a, "types"_a,
           "Whole ranges, contiguous; copied before the call returns.")
      .def("put_gradient_part", &PyUpdater::put_gradient_part, "range"_a, "first"_a, "address"_a,
           "type"_a, "count"_a, "Elements [first, first + count) of a range, cut as the core asks.")
      .def("skip_gradient", &PyUpdater::skip_gradient, "range"_a,
           "This range gets no gradient in this step and is skipped by the update.")
      .def("finish_gradients", &PyUpdater::finish_gradients, "unscale"_a,
           "(L2 norm after unscaling, finite, name of the first range that is not finite)")
      .def("early_update_refusal", &PyUpdater::early_update_refusal,
           "Why start_early_update() cannot be called; '': it can.")
      .def("start_early_update", &PyUpdater::start_early_update, "number"_a, "gradient_scale"_a,
           "groups"_a, "type"_a, "address"_a, "norm_max"_a, "kept"_a = nb::none(),
           "Right after begin_step(): ranges are updated as their gradients become complete, by "
           "the guess that start_update() will be given the same. norm_max: of all gradients, up "
           "to which that is so; 0: whatever it is. Weights come up at any time from then on.")
      .def("start_update", &PyUpdater::start_update, "number"_a, "gradient_scale"_a, "groups"_a,
           "type"_a, "address"_a, "kept"_a = nb::none(), "table_rates"_a = std::vector<double>(),
           "groups: for each range a dict of torch's options and 'step' (counts from 1), or None "
           "to skip it. Weights go to one flat array in the order of the space. kept: only those "
           "of the subgroups of these spans, [(first, count)]; with the option stream_weights the "
           "others are updated when a LayerWindow asks for them, or when something needs the "
           "update to end. table_rates: the learning rate of each table.")
      .def("wait_weights", &PyUpdater::wait_weights, "first"_a, "count"_a)
      .def("start_commit", &PyUpdater::start_commit, "client_metadata"_a)
      .def("committing", &PyUpdater::committing, "Whether a commit that was started goes on.")
      .def("wait_commit", &PyUpdater::wait_commit)
      .def("abort", &PyUpdater::abort);
}

void define_tables(nb::class_<PyUpdater, PyWeightSource>& updater) {
  updater
      .def("prefetch_rows", &PyUpdater::prefetch_rows, "table"_a, "ids"_a, "count"_a,
           "A hint; returns at once. table: its number in the option tables. ids: of [count] i64.")
      .def("gather_rows", &PyUpdater::gather_rows, "table"_a, "ids"_a, "count"_a, "type"_a, "out"_a,
           "keep"_a, "Weights [count, dim] to `out`. keep: gradients of these rows will follow.")
      .def("add_row_gradient", &PyUpdater::add_row_gradient, "table"_a, "ids"_a, "count"_a,
           "type"_a, "gradient"_a, "[count, dim], after begin_step(); repeats are added in order.")
      .def("put_rows", &PyUpdater::put_rows, "table"_a, "ids"_a, "count"_a, "values"_a,
           "Weights [count, dim] f32, before initialize().")
      .def("load_tables", &PyUpdater::load_tables, "checkpoint"_a,
           "The next edit_state() gives all tables the rows of the checkpoint, which lives until "
           "then. "
           "Without tables on both sides nothing happens.")
      .def("read_records", &PyUpdater::read_records, "table"_a, "first"_a, "count"_a, "visit"_a,
           "visit(first row, memoryview of floats) of some rows after others: of each its weights, "
           "the planes of the rule, and the step of its last update, a u32.");
}

void define_weights(nb::module_& module) {
  nb::class_<PyWeightSource>(module, "WeightSource",
                             "Weights that come from devices: an Updater's or Weights.")
      .def("count", &PyWeightSource::count, "Elements.")
      .def("subgroup_end", &PyWeightSource::subgroup_end, "element"_a,
           "Where the subgroup ends that holds an element: what is read at once.");
  nb::class_<PyWeights, PyWeightSource>(
      module, "Weights",
      "Weights that nobody updates, in a file on each of several directories. Addresses are of "
      "host memory that stays valid during the call. Every method raises smartinf.Error.")
      .def_static("create", &PyWeights::create, "paths"_a, "elements"_a, "type"_a, "description"_a,
                  "stripe_bytes"_a = StripedWeights::kStripeBytes,
                  "Makes the files anew in directories that exist, with all their space. "
                  "description: text that is kept with them.")
      .def_static("open", &PyWeights::open, "paths"_a,
                  "What finish() has completed; the directories in any order. None: there is no "
                  "file in any of them.")
      .def_static("remove", &PyWeights::remove_files, "paths"_a,
                  "Deletes the files that are there. Not while they are open.")
      .def("write", &PyWeights::write, "first"_a, "address"_a, "count"_a,
           "Elements [first, first + count), in ascending order, without gaps.")
      .def("finish", &PyWeights::finish, "Makes all durable. Then the weights can be read.")
      .def("elements", &PyWeights::count)
      .def("type", &PyWeights::type)
      .def("description", &PyWeights::description)
      .def("load_weights", &PyWeights::load_weights, "type"_a, "address"_a, "kept"_a = nb::none(),
           "As Updater.load_weights().")
      .def("close", &PyWeights::close, "Waits for what is being read and lets go of the files.");
}

void define_layer_window(nb::module_& module) {
  module.def(
      "window_slot_bytes", &smartinf::python::window_slot_bytes, "source"_a, "units"_a, "type"_a,
      "slots"_a,
      "Bytes of each of so many slots, largest first, that hold units which are next to each "
      "other: [(first, count)], in the order of their use.");
  module.def(
      "slot_sizes",
      [](const std::vector<uint64_t>& units, uint32_t slots) {
        return smartinf::plan::slot_sizes(units, slots);
      },
      "units"_a, "slots"_a, "The same of units of these sizes.");
  module.def("memory_is_unified", &smartinf::base::memory_is_unified,
             "Whether this machine's accelerator computes in the host's memory.");
  module.def(
      "choose_slot",
      [](const std::vector<std::tuple<uint64_t, std::optional<uint32_t>, bool>>& slots,
         const std::vector<uint32_t>& order, size_t next, const std::vector<uint64_t>& sizes,
         uint32_t unit, std::optional<size_t> ahead) {
        std::vector<smartinf::plan::Slot> choice;
        for (const auto& [size, of, held] : slots) choice.push_back({size, of, held});
        return smartinf::plan::choose_slot(choice, {order, next, sizes}, unit, ahead);
      },
      "slots"_a, "order"_a, "next"_a, "sizes"_a, "unit"_a, "ahead"_a = nb::none(),
      "The slot, of (size, its unit or None, whether it is held), for a unit that is used now, or "
      "ahead at order[ahead]; order[next] is used next. None where there is none.");
  nb::class_<PyLayerWindow>(
      module, "LayerWindow",
      "Units of weights that pass through a fixed number of slots, read before they are used. "
      "Sizes are in elements. Every method raises smartinf.Error.")
      .def(nb::init<PyWeightSource&, const smartinf::python::PySpans&, const std::string&,
                    const std::vector<std::pair<uintptr_t, uint64_t>>&, uintptr_t,
                    const smartinf::python::PySpans&, nb::object>(),
           "source"_a, "units"_a, "type"_a, "slots"_a, "kept_address"_a = 0,
           "kept"_a = smartinf::python::PySpans(), "memory"_a = nb::none(), nb::keep_alive<1, 2>(),
           "slots: (address, bytes) of memory of window_slot_bytes() that stays until close() of "
           "the window or of its source; on multiples of 4096 they are read without a copy. "
           "kept_address, kept: of the flat array to which load_weights() and updates bring these "
           "spans, [(first, count)]. memory: owns the slots, and is never freed where a read into "
           "them hangs.")
      .def("start", &PyLayerWindow::start, "order"_a,
           "The uses to come, in order. Reading ahead begins; units that are in a slot stay there.")
      .def("get", &PyLayerWindow::get, "unit"_a,
           "The address of the unit's first element, when its weights are there: of the update "
           "that was started last, or of the committed step. They stay until release(). Raises "
           "UsageError when every slot is held.")
      .def("has_come", &PyLayerWindow::has_come, "unit"_a, "Whether get() would return at once.")
      .def("release", &PyLayerWindow::release, "unit"_a, "Once for every get().")
      .def("updated", &PyLayerWindow::updated,
           "After start_update(), abort() and edit_state(): what was read before is old.")
      .def("hits", &PyLayerWindow::hits, "get()s of units that were read or being read.")
      .def("misses", &PyLayerWindow::misses)
      .def("close", &PyLayerWindow::close, "Waits for what is being read.");
}

}  // namespace

NB_MODULE(_core, module) {
  // Open optimizers are closed at exit (smartinf/__init__.py); what a debugger or a reference cycle
  // holds beyond that is no news to the user.
  nb::set_leak_warnings(false);
  smartinf::python::register_errors();
  smartinf::python::collect_remarks();
  module.doc() = "The core of smartinf. Internal: use smartinf.AdamW and its siblings.";
  module.attr("__version__") = SMARTINF_VERSION;
  define_functions(module);
  define_checkpoint(module);
  define_ranks_checkpoint(module);
  define_weights(module);
  define_ranks(module);
  define_spool(module);
  define_cache(module);
  nb::class_<PyUpdater, PyWeightSource> updater(
      module, "Updater",
      "Optimizer state on devices. Sizes are in elements, addresses are of host memory that stays "
      "valid during the call (during the step for weights). Data types: 'f32', 'bf16', 'f16'. "
      "Every method raises smartinf.Error.");
  define_state(updater);
  define_step(updater);
  define_tables(updater);
  define_layer_window(module);
}
