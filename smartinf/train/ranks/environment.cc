#include "smartinf/train/ranks/environment.h"

#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include <fmt/format.h>

namespace smartinf::train {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

/// Variables that say which process this is.
struct Launcher {
  const char* name;
  const char* rank;
  const char* world;
};
// The innermost first: mpirun starts its daemons by srun where it can, and they pass that on.
// SLURM_STEP_NUM_TASKS and not SLURM_NTASKS: the script of a batch job has the latter as well, and
// is one process.
constexpr std::array<Launcher, 3> kLaunchers{{
    {"torchrun", "RANK", "WORLD_SIZE"},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},
}};

Status invalid(std::string what, std::string advice) {
  return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
}

Result<uint64_t> number(const char* name, std::string_view text, uint64_t most) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value <= most) return value;
  return invalid(
      fmt::format("the environment's {} is \"{}\", not a whole number up to {}", name, text, most),
      "Set it as torchrun does, or unset it");
}

}  // namespace

Result<std::optional<RankEnvironment>> rank_environment(const GetVariable& get) {
  using Found = std::optional<RankEnvironment>;
  constexpr uint64_t kRanksMax = 1u << 16;
  RankEnvironment found;
  const Launcher* launcher = nullptr;
  for (const Launcher& candidate : kLaunchers) {
    if (get(candidate.world) == nullptr) continue;
    launcher = &candidate;
    break;
  }
  if (launcher == nullptr) return Found();
  SI_ASSIGN_OR_RETURN(const uint64_t world,
                      number(launcher->world, get(launcher->world), kRanksMax));
  if (world == 1) return Found();
  const char* rank_text = get(launcher->rank);
  if (world == 0 || rank_text == nullptr) {
    return invalid(fmt::format("the environment has {} = {}, but {}", launcher->world, world,
                               world == 0 ? "there is one process at least"
                                          : fmt::format("no {}", launcher->rank)),
                   "Start the processes with torchrun, srun or mpirun, or unset it");
  }
  SI_ASSIGN_OR_RETURN(const uint64_t rank, number(launcher->rank, rank_text, kRanksMax));
  if (rank >= world) {
    return invalid(fmt::format("the environment has {} = {}, but {} = {}", launcher->rank, rank,
                               launcher->world, world),
                   "Ranks count from 0");
  }
  found.rank = static_cast<uint32_t>(rank);
  found.world = static_cast<uint32_t>(world);

  const char* host = get("MASTER_ADDR");
  const char* port = get("MASTER_PORT");
  if (host == nullptr || port == nullptr || *host == 0) {
    return invalid(
        fmt::format("this is rank {} of {} ({}), but the environment has no {}", rank, world,
                    launcher->name, host == nullptr || *host == 0 ? "MASTER_ADDR" : "MASTER_PORT"),
        "Set MASTER_ADDR to the name of rank 0's machine and MASTER_PORT to a free port "
        "of it, the same for all ranks");
  }
  found.host = host;
  SI_ASSIGN_OR_RETURN(const uint64_t port_number, number("MASTER_PORT", port, 65535));
  found.port = static_cast<uint16_t>(port_number);

  const auto text_of = [&](const char* name) {
    const char* value = get(name);
    return std::string(value == nullptr ? "" : value);
  };
  found.store_runs = text_of("TORCHELASTIC_USE_AGENT_STORE") == "True";
  found.start = text_of("TORCHELASTIC_RUN_ID") + "/" + text_of("TORCHELASTIC_RESTART_COUNT");
  return Found(std::move(found));
}

Result<std::optional<RankEnvironment>> rank_environment() {
  return rank_environment([](const char* name) -> const char* { return std::getenv(name); });
}

}  // namespace smartinf::train
