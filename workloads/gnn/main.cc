// smartinf-gnn: graph networks over all vertices of a graph whose features and activations are
// tables of rows on devices.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/end_at_signals.h"
#include "smartinf/base/units.h"

#include "workloads/gnn/epochs.h"
#include "workloads/gnn/graph_folder.h"
#include "workloads/gnn/ranks.h"

namespace smartinf::workloads {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using nlohmann::ordered_json;

struct Flags {
  std::string folder;
  // import
  bool apt = false;
  std::string edges, features_file, labels_file, npz;
  uint32_t rmat = 0;
  uint64_t blocks = 0;
  uint64_t vertices = 0;
  double degree = 16;
  uint32_t features = 256;
  uint32_t classes = 16;
  // partition
  uint64_t block_vertices = 4096;
  graph::PartitionMethod method =
      graph::has_metis() ? graph::PartitionMethod::kMetis : graph::PartitionMethod::kStream;
  // train
  EpochOptions epochs;
  std::string memory = "1GiB";
  std::string keep;
  uint64_t until = 100;
  std::string parameters;
  bool json = false;
  // ranks
  std::optional<uint32_t> preload;
  uint32_t sample_hops = 0;
  graph::Sampling sampling;
  double alone_s = 0, exchange_s = 0;
  std::string rows = "0", within = "0", between = "0", room = "0";
};

/// With the number of hops to preload: as given, or as counted bytes and the rates say.
Status settle_ranks(Flags& flags, const Graph& graph, std::vector<graph::PreloadCost>& costs,
                    graph::PreloadRates& rates) {
  RankOptions& ranks = flags.epochs.ranks;
  if (flags.sample_hops > 0) {
    ranks.sampling = flags.sampling;
    ranks.sampling->hops = flags.sample_hops;
  }
  ranks.preload = flags.preload.value_or(1);
  uint64_t room = 0;
  for (const auto& [text, rate] :
       {std::pair(&flags.rows, &rates.rows), std::pair(&flags.within, &rates.within),
        std::pair(&flags.between, &rates.between)}) {
    SI_ASSIGN_OR_RETURN(const uint64_t bytes, base::parse_bytes(*text));
    if (bytes > 0) *rate = static_cast<double>(bytes);
  }
  SI_ASSIGN_OR_RETURN(room, base::parse_bytes(flags.room));
  if (room > 0) rates.room_bytes = room;
  rates.alone_s = flags.alone_s;
  rates.exchange_s = flags.exchange_s;
  const bool known = rates.within > 0 && rates.between > 0 && rates.alone_s > 0;
  if (flags.preload || ranks.sampling || ranks.servers == 1 || !known) return Status();
  SI_ASSIGN_OR_RETURN(
      costs, preload_costs(graph, layers_of(flags.epochs.model, graph.feature_count, graph.classes),
                           flags.epochs));
  SI_ASSIGN_OR_RETURN(const size_t best, graph::choose_preload(costs, rates));
  ranks.preload = costs[best].hops;
  return Status();
}

Status import(const Flags& flags) {
  const int sources = int{flags.apt} + int{!flags.edges.empty()} + int{!flags.npz.empty()} +
                      int{flags.rmat > 0} + int{flags.blocks > 0};
  if (sources != 1) {
    return Status(ErrorCode::kInvalidArgument, fmt::format("{} sources of a graph", sources),
                  "Give one of --apt, --edges, --npz, --rmat and --made-of.");
  }
  if (!flags.edges.empty() && (flags.features_file.empty() || flags.labels_file.empty())) {
    return Status(ErrorCode::kInvalidArgument, "--edges has neither features nor classes",
                  "Give --features-file and --labels-file, .npy files with a row for each vertex.");
  }
  const uint64_t seed = flags.epochs.seed;
  Result<Imported> graph =
      flags.apt            ? import_apt(flags.features)
      : !flags.npz.empty() ? import_npz(flags.npz)
      : flags.rmat > 0 ? import_rmat(flags.rmat, flags.degree, flags.features, flags.classes, seed)
      : flags.blocks > 0
          ? import_blocks(flags.blocks, flags.degree, flags.features, flags.classes, seed)
          : import_edges(flags.edges, flags.features_file, flags.labels_file, flags.vertices);
  SI_RETURN_IF_ERROR(graph.status());
  const std::string text = fmt::format("{} vertices, {} edges, {} features", graph->csr.vertices(),
                                       graph->csr.edges() / 2, graph->feature_count);
  SI_RETURN_IF_ERROR(write_graph(flags.folder, std::move(*graph), seed));
  fmt::print("{}\n", text);
  return Status();
}

Status partition(const Flags& flags) {
  SI_ASSIGN_OR_RETURN(const Cut cut,
                      partition_graph(flags.folder, flags.block_vertices, flags.method));
  fmt::print(
      "{} blocks, {:.1f} % of {} edges between blocks\n", cut.blocks,
      100.0 * static_cast<double>(cut.cut) / static_cast<double>(std::max<uint64_t>(1, cut.edges)),
      cut.edges / 2);
  return Status();
}

Status plan(Flags& flags) {
  SI_ASSIGN_OR_RETURN(const Graph graph, load_graph(flags.folder));
  std::vector<graph::PreloadCost> costs;
  graph::PreloadRates rates;
  SI_RETURN_IF_ERROR(settle_ranks(flags, graph, costs, rates));
  const std::vector<Layer> layers =
      layers_of(flags.epochs.model, graph.feature_count, graph.classes);
  SI_ASSIGN_OR_RETURN(std::vector<EpochPlan> batches, plan_epoch(graph, layers, flags.epochs));
  EpochPlan& made = batches[0];
  uint64_t halo = 0;
  size_t parts = 0;
  for (const EpochPlan& batch : batches) {
    parts += batch.parts.size();
    for (const Part& part : batch.parts) halo += part.halo.size();
    made.part_bytes = std::max(made.part_bytes, batch.part_bytes);
    for (uint64_t EpochPlan::*const sum :
         {&EpochPlan::rows_gathered, &EpochPlan::rows_put, &EpochPlan::up_bytes,
          &EpochPlan::down_bytes, &EpochPlan::row_bytes, &EpochPlan::within_bytes,
          &EpochPlan::between_bytes}) {
      if (&batch != &made) made.*sum += batch.*sum;
    }
  }
  uint64_t room = 0;
  ordered_json tables = ordered_json::array();
  for (const EpochPlan::Table& table : made.tables) {
    const uint64_t bytes = made.vertices.size() * table.dim * sizeof(float);
    room += bytes;
    tables.push_back({{"name", table.name},
                      {"bytes", bytes},
                      {"in_memory", table.in_memory},
                      {"halo_in_memory", table.halo_in_memory}});
    if (!flags.json) {
      fmt::print("{:<24} {:>10}  {}\n", table.name, base::format_bytes(bytes),
                 table.in_memory        ? "in memory"
                 : table.halo_in_memory ? "on devices, with what parts need of each other in memory"
                                        : "on devices");
    }
  }
  ordered_json preload = ordered_json::array();
  for (const graph::PreloadCost& cost : costs) {
    preload.push_back({{"hops", cost.hops},
                       {"work", cost.work},
                       {"exchanges", cost.exchanges},
                       {"row_bytes", cost.row_bytes},
                       {"within_bytes", cost.within_bytes},
                       {"between_bytes", cost.between_bytes},
                       {"room_bytes", cost.room_bytes},
                       {"seconds", graph::predicted_seconds(cost, rates)}});
  }
  if (flags.json) {
    fmt::print("{}\n", ordered_json{{"parts", parts},
                                    {"halo_rows", halo},
                                    {"part_bytes", made.part_bytes},
                                    {"tables", tables},
                                    {"device_bytes", room},
                                    {"rows_gathered", made.rows_gathered},
                                    {"rows_put", made.rows_put},
                                    {"up_bytes", made.up_bytes},
                                    {"down_bytes", made.down_bytes},
                                    {"row_bytes", made.row_bytes},
                                    {"within_bytes", made.within_bytes},
                                    {"between_bytes", made.between_bytes},
                                    {"preload", preload},
                                    {"chosen", flags.epochs.ranks.preload}}
                           .dump());
    return Status();
  }
  fmt::print(
      "{} parts, of at most {} in memory, with {:.2f} rows of neighbours for each of their own\n"
      "an epoch gathers {} rows and puts {}: {} up and {} down the devices' links\n"
      "the devices need {} for tables\n",
      parts, base::format_bytes(made.part_bytes), static_cast<double>(halo) / graph.csr.vertices(),
      made.rows_gathered, made.rows_put, base::format_bytes(made.up_bytes),
      base::format_bytes(made.down_bytes), base::format_bytes(room));
  if (flags.epochs.ranks.ranks == 1) return Status();
  fmt::print("that is of rank 0, which sends {} to ranks of its server and {} to others\n",
             base::format_bytes(made.within_bytes), base::format_bytes(made.between_bytes));
  for (const graph::PreloadCost& cost : costs) {
    fmt::print(
        "{} {} hops: {:.2f} of an epoch's computing, {} of rows, {} within and {} between servers, "
        "{} of "
        "tables: {}\n",
        cost.hops == flags.epochs.ranks.preload ? '*' : ' ', cost.hops, cost.work,
        base::format_bytes(cost.row_bytes), base::format_bytes(cost.within_bytes),
        base::format_bytes(cost.between_bytes), base::format_bytes(cost.room_bytes),
        base::format_seconds(graph::predicted_seconds(cost, rates)));
  }
  return Status();
}

void print(const Flags& flags, const EpochPlan& plan, const EpochReport& report) {
  if (flags.epochs.ranks.rank != 0) return;
  const auto& [train, validation, test] = report.accuracy;
  if (flags.json) {
    fmt::print("{}\n", ordered_json{{"epoch", report.epoch},
                                    {"loss", report.loss},
                                    {"train", train},
                                    {"validation", validation},
                                    {"test", test},
                                    {"seconds", report.seconds},
                                    {"parts", plan.parts.size()},
                                    {"up_bytes", report.up_bytes},
                                    {"down_bytes", report.down_bytes},
                                    {"planned_up_bytes", report.planned_up_bytes},
                                    {"planned_down_bytes", report.planned_down_bytes},
                                    {"compute_s", report.compute_seconds},
                                    {"rows_s", report.row_seconds},
                                    {"row_bytes", report.row_bytes},
                                    {"exchange_s", report.exchange_seconds},
                                    {"within_bytes", report.within_bytes},
                                    {"between_bytes", report.between_bytes},
                                    {"planned_within_bytes", report.planned_within_bytes},
                                    {"planned_between_bytes", report.planned_between_bytes}}
                           .dump());
  } else {
    fmt::print(
        "epoch {:>4}  loss {:.5f}  right of training {:.4f}, validation {:.4f}, test {:.4f}  {}\n",
        report.epoch, report.loss, train, validation, test, base::format_seconds(report.seconds));
  }
  std::fflush(stdout);
}

Status settle_ranks(Flags& flags, const Graph& graph) {
  std::vector<graph::PreloadCost> costs;
  graph::PreloadRates rates;
  return settle_ranks(flags, graph, costs, rates);
}

Status train(Flags& flags) {
  SI_ASSIGN_OR_RETURN(const Graph graph, load_graph(flags.folder));
  SI_RETURN_IF_ERROR(settle_ranks(flags, graph));
  SI_ASSIGN_OR_RETURN(const auto epochs, Epochs::open(graph, flags.epochs));
  const RankOptions& ranks = flags.epochs.ranks;
  if (!flags.json && ranks.rank == 0) {
    const std::string way =
        ranks.sampling ? "samples" : fmt::format("{} hops preloaded", ranks.preload);
    fmt::print(
        "{}{} parts; {}\n",
        ranks.ranks == 1
            ? ""
            : fmt::format("{} ranks on {} servers, {}; ", ranks.ranks, ranks.servers, way),
        epochs->plan().parts.size(),
        epochs->fresh() ? "a new run" : fmt::format("goes on after epoch {}", epochs->done()));
  }
  while (epochs->done() < flags.until) {
    SI_ASSIGN_OR_RETURN(const EpochReport report, epochs->train());
    print(flags, epochs->plan(), report);
  }
  return Status();
}

/// The share of test vertices that have the class most frequent among all their neighbours.
double vote(const Graph& graph) {
  uint64_t right = 0;
  uint64_t all = 0;
  std::vector<uint32_t> votes(graph.classes);
  for (graph::Vertex v = 0; v < graph.csr.vertices(); ++v) {
    if (graph.split[v] != Split::kTest) continue;
    std::ranges::fill(votes, 0u);
    for (const graph::Vertex to : graph.csr.neighbours(v)) {
      if (graph.labels[to] >= 0) ++votes[static_cast<size_t>(graph.labels[to])];
    }
    ++all;
    const auto most = std::ranges::max_element(votes);
    right += *most > 0 && most - votes.begin() == graph.labels[v];
  }
  return static_cast<double>(right) / static_cast<double>(std::max<uint64_t>(1, all));
}

Status evaluate(Flags& flags) {
  SI_ASSIGN_OR_RETURN(const Graph graph, load_graph(flags.folder));
  SI_RETURN_IF_ERROR(settle_ranks(flags, graph));
  EpochOptions options = flags.epochs;
  options.create = !options.start.empty();
  SI_ASSIGN_OR_RETURN(const auto epochs, Epochs::open(graph, options));
  SI_ASSIGN_OR_RETURN(const EpochReport report, epochs->evaluate());
  print(flags, epochs->plan(), report);
  if (!flags.json) fmt::print("neighbours' vote: {:.4f} of test\n", vote(graph));
  if (flags.parameters.empty()) return Status();
  return epochs->write_parameters(flags.parameters);
}

template <typename E>
void add_enum(CLI::App& app, const std::string& name, E& value, const std::string& help) {
  app.add_option_function<std::string>(
         name, [&value](const std::string& text) { value = *base::enum_from_name<E>(text); }, help)
      ->check(CLI::IsMember(base::enum_name_list<E>()))
      ->default_str(std::string(base::enum_name(value)));
}

void add_epoch_flags(CLI::App& app, Flags& flags, bool devices) {
  EpochOptions& epochs = flags.epochs;
  add_enum(app, "--model", epochs.model.model, "Kind of the layers");
  app.add_option("--layers", epochs.model.layers, "Number of layers")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  app.add_option("--hidden", epochs.model.hidden, "Features between layers")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  app.add_option("--memory", flags.memory, "For parts, tables in memory and the devices' cache")
      ->capture_default_str();
  app.add_option("--keep", flags.keep, "Tables that may stay in memory [a quarter of --memory]");
  app.add_option("--parts", epochs.parts, "That vertices are computed in [as few as fit]");
  app.add_flag("--json", flags.json, "Print flat JSON objects");
  app.add_option("--servers", epochs.ranks.servers, "That the ranks are on, as many on each")
      ->check(CLI::Range(1, 1 << 16));
  CLI::Option* const preload = app.add_option(
      "--preload", flags.preload,
      "Hops around a server of which it has the features, and takes nothing from others "
      "until they are used up [by the rates; 1 without]");
  app.add_option("--sample", flags.sample_hops,
                 "Each server trains on a sample of so many hops around it, without others' rows")
      ->excludes(preload);
  app.add_option("--fanout", flags.sampling.fanout,
                 "Neighbours that a vertex of a sample brings in")
      ->capture_default_str();
  app.add_option("--batches", epochs.ranks.batches,
                 "With --sample: of a server in an epoch, each with an update")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--alone", flags.alone_s,
                 "Seconds of computing an epoch in one process with a rank's threads: compute_s of "
                 "train --json");
  app.add_option("--rows", flags.rows,
                 "Bytes of rows per second that a rank gathers and puts: row_bytes by rows_s "
                 "[they take no time]");
  app.add_option("--within", flags.within, "Bytes per second of a rank to others of its server");
  app.add_option("--between", flags.between, "Bytes per second of a server to others");
  app.add_option("--exchange", flags.exchange_s,
                 "Seconds of an exchange of few rows: exchange_s of train --json --preload 0 on a "
                 "graph of few vertices, by 2 layers - 1 [bytes alone take time]");
  app.add_option("--room", flags.room, "Bytes that a rank's devices have for tables");
  if (!devices) {
    app.add_option("--ranks", epochs.ranks.ranks, "That share the graph")
        ->check(CLI::Range(1, 1 << 16));
    return;
  }
  app.add_option("--start", epochs.start,
                 "Safetensors file with the parameters that a new run begins with");
  app.add_option("--device", epochs.devices, "Directory of a device; may be given several times")
      ->required();
  app.add_option("--threads", epochs.threads, "That compute [the cores]")
      ->check(CLI::Range(1, 1024));
  app.add_option("--seed", epochs.seed, "Of the parameters that a run begins with")
      ->capture_default_str();
}

void add_commands(CLI::App& app, Flags& flags, Status& outcome) {
  const auto add = [&](const std::string& name, const std::string& help, auto function) {
    CLI::App* command = app.add_subcommand(name, help);
    command->add_option("graph", flags.folder, "Folder of the graph")->required();
    command->callback([&flags, &outcome, name, function] {
      const auto memory = base::parse_bytes(flags.memory);
      outcome = memory.status();
      if (!outcome.ok()) return;
      flags.epochs.memory_bytes = *memory;
      if (!flags.keep.empty()) {
        const auto keep = base::parse_bytes(flags.keep);
        outcome = keep.status();
        if (!outcome.ok()) return;
        flags.epochs.keep_bytes = *keep;
      }
      if (name == "train" || name == "eval") {
        outcome = join_ranks(flags.epochs.ranks);
        if (!outcome.ok()) return;
      }
      outcome = function(flags);
      const RankOptions& ranks = flags.epochs.ranks;
      if (outcome.ok() || ranks.collectives == nullptr) return;
      ranks.collectives->failed(outcome);
      outcome = std::move(outcome).with_context(fmt::format("rank {}", ranks.rank));
    });
    return command;
  };
  CLI::App* command = add("import", "Make the folder of a graph", import);
  command->add_flag("--apt", flags.apt, "Debian's packages, as apt-cache knows them");
  command->add_option("--edges", flags.edges, "Text of edges, \"from to\" on each line");
  command->add_option("--features-file", flags.features_file,
                      "With --edges: .npy of [vertices, features]");
  command->add_option("--labels-file", flags.labels_file,
                      "With --edges: .npy of [vertices] classes, -1: none");
  command->add_option("--vertices", flags.vertices, "With --edges [rows of the features]")
      ->check(CLI::Range(uint64_t{1}, uint64_t{0xffffffff}));
  command->add_option("--npz", flags.npz,
                      "Arrays edge_index, x, y, and train_mask, val_mask, test_mask");
  command->add_option("--rmat", flags.rmat, "Made by R-MAT, of 2^N vertices")
      ->check(CLI::Range(1, 31));
  command->add_option("--made-of", flags.blocks, "Made of as many blocks as classes: vertices")
      ->check(CLI::Range(uint64_t{1}, uint64_t{0xffffffff}));
  command->add_option("--degree", flags.degree, "Of a made graph: neighbours of a vertex, at most")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command->add_option("--features", flags.features, "Of --apt and made graphs")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  command->add_option("--classes", flags.classes, "Of a made graph")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--seed", flags.epochs.seed, "Of what is drawn")->capture_default_str();

  command =
      add("partition", "Number the vertices by blocks with few edges between them", partition);
  command->add_option("--block", flags.block_vertices, "Vertices of a block")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 31))
      ->capture_default_str();
  add_enum(*command, "--method", flags.method, "How they are found");

  add_epoch_flags(*add("plan", "Say what an epoch holds and moves", plan), flags, false);
  command = add("train", "Train until an epoch; goes on with the run that the devices hold", train);
  add_epoch_flags(*command, flags, true);
  command->add_option("--epochs", flags.until, "Epochs, with those that are done")
      ->capture_default_str();
  command->add_option("--lr", flags.epochs.lr, "Learning rate of Adam")
      ->check(CLI::Range(0.0, 1e3))
      ->capture_default_str();
  command = add("eval", "Say how many vertices the trained network gets right", evaluate);
  add_epoch_flags(*command, flags, true);
  command->add_option("--parameters", flags.parameters,
                      "Safetensors file that the parameters are written to");
}

}  // namespace
}  // namespace smartinf::workloads

int main(int argc, char** argv) {
  using namespace smartinf;
  if (const int failed = workloads::start_with_ranks(argv); failed != 0) return failed;
  base::end_at_signals("smartinf-gnn");
  CLI::App app("Graph networks over graphs that are larger than memory");
  app.require_subcommand(1);
  workloads::Flags flags;
  base::Status outcome;
  workloads::add_commands(app, flags, outcome);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (outcome.ok()) return 0;
  fmt::print(stderr, "smartinf-gnn: {}\n", outcome.to_string());
  return outcome.code() == base::ErrorCode::kInvalidArgument ? 2 : 1;
}
