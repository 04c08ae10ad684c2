// smartinf-graph: graph algorithms, and an accelerator that runs them on DRAM with and without
// gather and scatter in its banks (Piccolo, HPCA 2025).
#include <cstdio>
#include <functional>
#include <string>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/end_at_signals.h"
#include "smartinf/base/enum_names.h"
#include "smartinf/base/file.h"
#include "smartinf/base/units.h"
#include "smartinf/graph/generators.h"
#include "smartinf/sim/dram/energy.h"

#include "workloads/graph_kernels/accelerator.h"

namespace smartinf::workloads {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using graph::Edge;
using nlohmann::ordered_json;

enum class Algorithm : uint8_t { kPagerank, kBfs, kComponents, kSssp };
inline constexpr std::array<std::string_view, 4> kAlgorithmNames{"pagerank", "bfs", "components",
                                                                 "sssp"};
constexpr base::EnumNames enum_names(Algorithm) { return kAlgorithmNames; }

enum class Kind : uint8_t { kRmat, kUniform, kBlocks };
inline constexpr std::array<std::string_view, 3> kKindNames{"rmat", "uniform", "blocks"};
constexpr base::EnumNames enum_names(Kind) { return kKindNames; }

/// As many vertices and edges as SNAP's graphs.
struct StandIn {
  std::string_view name;
  uint64_t vertices;
  uint64_t edges;
};
constexpr StandIn kStandIns[] = {{"pokec", 1'632'803, 30'622'564},
                                 {"orkut", 3'072'441, 117'185'083},
                                 {"livejournal", 4'847'571, 68'993'773}};

// What stands for the paper's accelerator. Fitted to PageRank's rows: kCacheBytes and
// kRowsCollected (fit.py, docs/graph.md).
constexpr uint64_t kCacheBytes = 7 << 17;
constexpr double kEdgesPerCycle = 8;
constexpr uint32_t kRowsCollected = 2816;
/// As the paper's figure counts them: writes to buffers are twice the reads from them, with nothing
/// scattered. Eight offsets of 10 bits are more than the 64 that a chip gets in a burst.
constexpr uint32_t kOffsetBursts = 2;

struct Flags {
  Algorithm algorithm = Algorithm::kPagerank;
  std::string file;
  std::string stand_in;
  Kind kind = Kind::kRmat;
  uint64_t vertices = 100'000;
  uint64_t edges = 1'600'000;
  uint64_t blocks = 64;
  double inside = 0.9;
  uint64_t seed = 1;
  uint64_t scale_down = 1;
  uint32_t iterations = 0;
  int64_t source = -1;
  std::string memory = "ddr4-2400-x8";
  Accelerator accelerator{.cache_bytes = kCacheBytes,
                          .rows_collected = kRowsCollected,
                          .edges_per_cycle = kEdgesPerCycle};
  uint32_t offset_bursts = kOffsetBursts;
  bool json = false;
};

Result<Csr> graph_of(const Flags& flags, bool vertices_given) {
  uint64_t vertices = flags.vertices;
  uint64_t edges = flags.edges;
  std::vector<Edge> list;
  if (!flags.file.empty()) {
    SI_ASSIGN_OR_RETURN(const std::string text,
                        base::read_text_file(flags.file, "cannot read the edges"));
    SI_ASSIGN_OR_RETURN(list, graph::edges_of_text(text, flags.file));
    if (!vertices_given) vertices = graph::vertices_of(list);
    if (vertices == 0) return Status(ErrorCode::kInvalidArgument, "the file has no edge");
    return Csr::make(vertices, list);
  }
  for (const StandIn& one : kStandIns) {
    if (one.name == flags.stand_in) {
      vertices = one.vertices / flags.scale_down;
      edges = one.edges / flags.scale_down;
    }
  }
  switch (flags.kind) {
    case Kind::kRmat:
      list = graph::rmat_edges(vertices, edges, flags.seed);
      break;
    case Kind::kUniform:
      list = graph::uniform_edges(vertices, edges, flags.seed);
      break;
    case Kind::kBlocks:
      list = graph::block_edges(vertices, edges, flags.blocks, flags.inside, flags.seed);
      break;
  }
  return Csr::make(vertices, list);
}

/// The vertex that a search begins at: the given one, or that with the most edges.
Result<Vertex> source_of(const Flags& flags, const Csr& csr) {
  if (flags.source >= csr.vertices()) {
    return Status(
        ErrorCode::kInvalidArgument,
        fmt::format("--source {}, but there are {} vertices", flags.source, csr.vertices()),
        "Vertices are numbered from 0.");
  }
  if (flags.source >= 0) return static_cast<Vertex>(flags.source);
  Vertex most = 0;
  for (Vertex v = 0; v < csr.vertices(); ++v) {
    if (csr.degree(v) > csr.degree(most)) most = v;
  }
  return most;
}

/// f(vector of values) of the algorithm's result.
template <typename Machine, typename Use>
void run_algorithm(const Flags& flags, uint32_t iterations, const Csr& csr, Vertex source,
                   Machine& machine, const Use& use) {
  switch (flags.algorithm) {
    case Algorithm::kPagerank:
      return use(pagerank(csr, iterations, machine));
    case Algorithm::kBfs:
      return use(breadth_first(csr, source, machine));
    case Algorithm::kComponents:
      return use(components(csr, machine));
    case Algorithm::kSssp:
      return use(shortest_paths(csr, source, machine));
  }
}

int fail(const Status& status) {
  fmt::print(stderr, "smartinf-graph: {}\n", status.to_string());
  return 2;
}

int run(const Flags& flags, bool vertices_given) {
  const auto csr = graph_of(flags, vertices_given);
  if (!csr.ok()) return fail(csr.status());
  const auto source = source_of(flags, *csr);
  if (!source.ok()) return fail(source.status());
  NoMachine machine;
  run_algorithm(flags, flags.iterations > 0 ? flags.iterations : 100, *csr, *source, machine,
                [](const auto& values) {
                  for (size_t v = 0; v < values.size(); ++v) {
                    using Value = std::decay_t<decltype(values[v])>;
                    if constexpr (std::is_same_v<Value, double>) {
                      fmt::print("{} {:.17g}\n", v, values[v]);
                    } else if (values[v] == kNotReached) {
                      fmt::print("{} -\n", v);
                    } else {
                      fmt::print("{} {}\n", v, values[v]);
                    }
                  }
                });
  return 0;
}

int simulate(const Flags& flags, bool vertices_given) {
  auto config = sim::dram::load_config(flags.memory);
  if (!config.ok()) return fail(config.status());
  config->in_bank.offset_bursts = flags.offset_bursts;
  const auto csr = graph_of(flags, vertices_given);
  if (!csr.ok()) return fail(csr.status());
  const auto source = source_of(flags, *csr);
  if (!source.ok()) return fail(source.status());
  ordered_json row = {{"algorithm", base::enum_name(flags.algorithm)},
                      {"vertices", csr->vertices()},
                      {"edges", csr->edges()},
                      {"memory", config->name},
                      {"cache_bytes", flags.accelerator.cache_bytes / flags.scale_down},
                      {"edges_per_cycle", flags.accelerator.edges_per_cycle}};
  double plain_cycles = 0;
  double plain_bursts = 0;
  double plain_joules = 0;
  for (const bool in_bank : {false, true}) {
    Accelerator accelerator = flags.accelerator;
    accelerator.in_bank = in_bank;
    accelerator.cache_bytes /= flags.scale_down;
    accelerator.rows_collected =
        static_cast<uint32_t>(std::max<uint64_t>(1, accelerator.rows_collected / flags.scale_down));
    // A component's edges are followed both ways.
    const uint64_t edges = csr->edges() * (flags.algorithm == Algorithm::kComponents ? 2 : 1);
    GraphMachine machine(*config, accelerator, csr->vertices(), edges);
    run_algorithm(flags, flags.iterations > 0 ? flags.iterations : 2, *csr, *source, machine,
                  [](const auto&) {});
    machine.finish();
    const sim::dram::Counts& counts = machine.counts();
    using sim::dram::Command;
    const auto cycles = static_cast<double>(counts.total_cycles());
    const double bursts =
        static_cast<double>(counts.bus_bytes) / config->organisation.burst_bytes();
    if (!in_bank) {
      plain_cycles = cycles;
      plain_bursts = bursts;
    }
    const std::string prefix = in_bank ? "in_bank_" : "plain_";
    row[prefix + "seconds"] = cycles / config->organisation.clock_hz;
    row[prefix + "accesses"] = machine.accesses();
    row[prefix + "misses"] = machine.misses();
    row[prefix + "bus_bytes"] = counts.bus_bytes;
    const double used_share =
        static_cast<double>(machine.used_bytes()) / static_cast<double>(counts.bus_bytes);
    row[prefix + "used_share"] = used_share;
    // Bursts, as shares of all that the conventional one moves.
    const auto share = [&](std::initializer_list<Command> commands) {
      double sum = 0;
      for (const Command command : commands) sum += static_cast<double>(counts.count(command));
      return sum / plain_bursts;
    };
    row[prefix + "accesses_read"] = share({Command::kRead});
    row[prefix + "accesses_write"] = share({Command::kWrite});
    row[prefix + "accesses_read_data_buffer"] = share({Command::kFetchWords});
    row[prefix + "accesses_write_buffers"] = share({Command::kSendOffsets, Command::kSendWords});
    row[prefix + "accesses_total"] = bursts / plain_bursts;
    for (size_t i = 0; i < sim::dram::kCauses; ++i) {
      const auto cause = static_cast<sim::dram::Cause>(i);
      row[fmt::format("{}{}_share", prefix, base::enum_name(cause))] = counts.share(cause);
    }
    if (in_bank) row["speedup"] = plain_cycles / cycles;
    const sim::dram::EnergyUse energy = sim::dram::energy_of(*config, counts);
    const double joules = energy.total();
    row[prefix + "joules"] = joules;
    for (size_t i = 0; joules > 0 && i < sim::dram::kEnergyNames.size(); ++i) {
      row[fmt::format("{}{}_energy_share", prefix, sim::dram::kEnergyNames[i])] =
          energy.joules[i] / joules;
    }
    if (in_bank && joules > 0) row["energy_saved"] = 1 - joules / plain_joules;
    plain_joules = joules;
    if (flags.json) continue;
    fmt::print(
        "{:<8} {:>10}  {:.3g} mJ  {:.1f} % of {} values missed, {} on the bus, {:.1f} % of "
        "them used\n",
        in_bank ? "in bank" : "plain", base::format_seconds(cycles / config->organisation.clock_hz),
        1e3 * joules,
        100.0 * static_cast<double>(machine.misses()) /
            static_cast<double>(std::max<uint64_t>(1, machine.accesses())),
        machine.accesses(), base::format_bytes(counts.bus_bytes), 100 * used_share);
  }
  if (flags.json) {
    fmt::print("{}\n", row.dump());
  } else {
    fmt::print("gather and scatter in the banks: {:.2f} times as fast\n",
               row["speedup"].get<double>());
  }
  return 0;
}

template <typename E>
CLI::Option* add_enum(CLI::App& app, const std::string& name, E& value, const std::string& help) {
  return app
      .add_option_function<std::string>(
          name, [&value](const std::string& text) { value = *base::enum_from_name<E>(text); }, help)
      ->check(CLI::IsMember(base::enum_name_list<E>()));
}

}  // namespace
}  // namespace smartinf::workloads

int main(int argc, char** argv) {
  using namespace smartinf::workloads;
  smartinf::base::end_at_signals("smartinf-graph");
  CLI::App app("Graph algorithms, and what gather and scatter in DRAM's banks gain them");
  app.require_subcommand(1);
  Flags flags;
  std::vector<std::string> names;
  for (const StandIn& one : kStandIns) names.emplace_back(one.name);
  int code = 0;
  for (const bool simulates : {false, true}) {
    CLI::App* command =
        simulates ? app.add_subcommand("simulate",
                                       "Predict an accelerator's time on DRAM, with and "
                                       "without gather and scatter in the banks")
                  : app.add_subcommand("run", "Compute, and print a line for each vertex");
    add_enum(*command, "--algorithm", flags.algorithm, "[pagerank]");
    command->add_option("--edges-file", flags.file, "Lines \"from to\", in place of a made graph");
    command
        ->add_option("--stand-in", flags.stand_in,
                     "Vertices and edges of a graph of SNAP's, made by --graph")
        ->check(CLI::IsMember(names));
    add_enum(*command, "--graph", flags.kind, "How edges are drawn [rmat]");
    CLI::Option* vertices =
        command
            ->add_option("--vertices", flags.vertices, "Of a made graph, or at least in the file")
            ->check(CLI::Range(uint64_t{1}, uint64_t{0xffffffff}))
            ->capture_default_str();
    command->add_option("--edges", flags.edges, "Of a made graph")
        ->check(CLI::Range(uint64_t{0}, uint64_t{1} << 34))
        ->capture_default_str();
    command->add_option("--blocks", flags.blocks, "blocks: number of them")
        ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 31))
        ->capture_default_str();
    command->add_option("--inside", flags.inside, "blocks: share of edges that stay in theirs")
        ->check(CLI::Range(0.0, 1.0))
        ->capture_default_str();
    command->add_option("--seed", flags.seed, "Of a made graph")->capture_default_str();
    command
        ->add_option("--iterations", flags.iterations,
                     simulates ? "pagerank [2]" : "pagerank [100]")
        ->check(CLI::Range(1u, 100'000u));
    command
        ->add_option("--source", flags.source,
                     "bfs, sssp: vertex to begin at [that with the most edges]")
        ->check(CLI::Range(int64_t{0}, int64_t{0xffffffff}));
    if (simulates) {
      Accelerator& accelerator = flags.accelerator;
      command->add_option("--memory", flags.memory, "As in smartinf simulate memory")
          ->capture_default_str();
      command->add_option("--cache-bytes", accelerator.cache_bytes, "Of vertices' values")
          ->check(CLI::Range(uint64_t{64}, uint64_t{1} << 40))
          ->capture_default_str();
      command
          ->add_option("--rows-collected", accelerator.rows_collected,
                       "DRAM rows whose missing words wait to be collected")
          ->check(CLI::Range(1u, 1u << 24))
          ->capture_default_str();
      command
          ->add_option("--offset-bursts", flags.offset_bursts,
                       "That bring a gather's or scatter's offsets to the bank")
          ->check(CLI::Range(1u, 8u))
          ->capture_default_str();
      command
          ->add_option("--edges-per-cycle", accelerator.edges_per_cycle,
                       "That processing elements take in, by the memory's clock")
          ->check(CLI::Range(1e-6, 1e6))
          ->capture_default_str();
      command
          ->add_option("--scale-down", flags.scale_down,
                       "Divides the stand-in's vertices and edges, the cache and the rows")
          ->check(CLI::Range(uint64_t{1}, uint64_t{10'000}))
          ->capture_default_str();
      command->add_flag("--json", flags.json, "Print one flat JSON object");
    }
    command->callback([&flags, &code, simulates, vertices] {
      code = (simulates ? simulate : run)(flags, vertices->count() > 0);
    });
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int shown = app.exit(error);
    return shown == 0 ? 0 : 2;
  }
  return code;
}
