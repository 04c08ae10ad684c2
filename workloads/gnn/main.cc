// smartinf-gnn: graph networks over all vertices of a graph whose features and activations are
// tables of rows on devices.
#include <csignal>
#include <cstdio>
#include <string>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/end_at_signals.h"
#include "smartinf/base/units.h"

#include "workloads/gnn/epochs.h"
#include "workloads/gnn/graph_folder.h"

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
};

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

Status plan(const Flags& flags) {
  SI_ASSIGN_OR_RETURN(const Graph graph, load_graph(flags.folder));
  const std::vector<Layer> layers =
      layers_of(flags.epochs.model, graph.feature_count, graph.classes);
  SI_ASSIGN_OR_RETURN(const EpochPlan made, plan_epoch(graph, layers, flags.epochs));
  uint64_t halo = 0;
  for (const Part& part : made.parts) halo += part.halo.size();
  uint64_t room = 0;
  ordered_json tables = ordered_json::array();
  for (const EpochPlan::Table& table : made.tables) {
    const uint64_t bytes = uint64_t{graph.csr.vertices()} * table.dim * sizeof(float);
    room += bytes;
    tables.push_back({{"name", table.name}, {"bytes", bytes}, {"in_memory", table.in_memory}});
    if (!flags.json) {
      fmt::print("{:<24} {:>10}  {}\n", table.name, base::format_bytes(bytes),
                 table.in_memory ? "in memory" : "on devices");
    }
  }
  if (flags.json) {
    fmt::print("{}\n", ordered_json{{"parts", made.parts.size()},
                                    {"halo_rows", halo},
                                    {"part_bytes", made.part_bytes},
                                    {"tables", tables},
                                    {"device_bytes", room},
                                    {"rows_gathered", made.rows_gathered},
                                    {"rows_put", made.rows_put},
                                    {"up_bytes", made.up_bytes},
                                    {"down_bytes", made.down_bytes}}
                           .dump());
    return Status();
  }
  fmt::print(
      "{} parts, of at most {} in memory, with {:.2f} rows of neighbours for each of their own\n"
      "an epoch gathers {} rows and puts {}: {} up and {} down the devices' links\n"
      "the devices need {} for tables\n",
      made.parts.size(), base::format_bytes(made.part_bytes),
      static_cast<double>(halo) / graph.csr.vertices(), made.rows_gathered, made.rows_put,
      base::format_bytes(made.up_bytes), base::format_bytes(made.down_bytes),
      base::format_bytes(room));
  return Status();
}

void print(const Flags& flags, const EpochPlan& plan, const EpochReport& report) {
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
                                    {"planned_up_bytes", plan.up_bytes},
                                    {"planned_down_bytes", plan.down_bytes}}
                           .dump());
  } else {
    fmt::print(
        "epoch {:>4}  loss {:.5f}  right of training {:.4f}, validation {:.4f}, test {:.4f}  {}\n",
        report.epoch, report.loss, train, validation, test, base::format_seconds(report.seconds));
  }
  std::fflush(stdout);
}

Status train(const Flags& flags) {
  SI_ASSIGN_OR_RETURN(const Graph graph, load_graph(flags.folder));
  SI_ASSIGN_OR_RETURN(const auto epochs, Epochs::open(graph, flags.epochs));
  if (!flags.json) {
    fmt::print(
        "{} parts; {}\n", epochs->plan().parts.size(),
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

Status evaluate(const Flags& flags) {
  SI_ASSIGN_OR_RETURN(const Graph graph, load_graph(flags.folder));
  EpochOptions options = flags.epochs;
  options.create = false;
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
  if (!devices) return;
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
    command->callback([&flags, &outcome, function] {
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
      outcome = function(flags);
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
