#include "apps/smartinf/train_ranks.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "smartinf/base/log.h"
#include "smartinf/train/product_rate.h"
#include "smartinf/train/ranks/device_ranks.h"
#include "smartinf/train/ranks/environment.h"
#include "smartinf/train/ranks/join_ranks.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/state_places.h"
#include "apps/smartinf/token_data.h"

namespace smartinf::apps {

using base::Result;
using base::Status;

namespace {

/// Another rank's recipe has other values than the first one's.
Status check_same_recipe(const config::LoadedRecipe& loaded, const train::Ranks& ranks) {
  SI_ASSIGN_OR_RETURN(const std::string first, ranks.from_first(config::print_recipe(loaded)));
  SI_ASSIGN_OR_RETURN(const config::LoadedRecipe there,
                      config::parse_recipe(first, "rank 0's recipe", {}));
  const auto changes = config::changed_keys(there.recipe, loaded.recipe);
  if (changes.empty()) return Status();
  return Status(base::ErrorCode::kInvalidArgument,
                fmt::format("{} is {} here, but {} on rank 0", changes.front().key,
                            changes.front().now, changes.front().before),
                "Start all ranks with the same recipe and flags");
}

}  // namespace

int fail(const train::Ranks& ranks, Status status, bool started) {
  const bool wrong_value = status.code() == base::ErrorCode::kInvalidArgument && !started;
  if (!ranks.alone()) {
    ranks.failed(status);
    status = std::move(status).with_context(fmt::format("rank {}", ranks.rank()));
  }
  return report(status, wrong_value ? kExitUsage : kExitFailed);
}

Result<train::Ranks> meet_ranks(config::LoadedRecipe& loaded, Interrupt& interrupt) {
  SI_ASSIGN_OR_RETURN(const auto environment, train::rank_environment([](const char* name) {
                        return static_cast<const char*>(std::getenv(name));
                      }));
  std::vector<engine::DeviceOptions>& devices = loaded.recipe.updater.devices;
  SI_ASSIGN_OR_RETURN(devices,
                      train::expand_rank_paths(devices, environment ? environment->world : 1));
  if (!environment) return train::Ranks();
  interrupt.expect_it_twice();
  if (environment->rank != 0) {
    base::set_log_sink([rank = environment->rank](base::LogLevel level, std::string_view message) {
      if (level == base::LogLevel::kWarning) {
        fmt::print(stderr, "warning: rank {}: {}\n", rank, message);
      }
    });
  }
  const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(loaded.recipe.options.ranks.timeout_s));
  interrupt.end_at_once(true);
  SI_ASSIGN_OR_RETURN(train::Ranks ranks, train::join_ranks(*environment, timeout));
  interrupt.end_at_once(false);
  const Status same = check_same_recipe(loaded, ranks);
  SI_RETURN_IF_ERROR(ranks.all_ok("the recipe", same));
  return ranks;
}

Status make_data(config::LoadedRecipe& loaded, const train::Ranks& ranks, bool start_over,
                 bool quiet, const Interrupt& interrupt) {
  // Machines may share a file system: the first rank's files are there before others look.
  const int mine = ranks.first() ? 0 : ranks.local_rank() == 0 ? 1 : 2;
  for (int turn = 0; turn < 3; ++turn) {
    Status made;
    if (turn == mine) {
      made = make_token_data(loaded.recipe, start_over, quiet || !ranks.first(), interrupt.token());
    }
    SI_RETURN_IF_ERROR(ranks.all_ok_without_timeout("token files", made));
  }
  return Status();
}

Status settle_precision(config::LoadedRecipe& loaded, const train::Ranks& ranks, bool start_over,
                        std::string& note) {
  train::TrainOptions& train = loaded.recipe.options.train;
  if (train.precision != train::Precision::kAuto) return Status();
  const auto choose = [&]() -> Status {
    if (!start_over && has_begun(train.run)) {
      const Result<config::LoadedRecipe> before = load_run(train.run);
      if (before.ok()) train.precision = before->recipe.options.train.precision;
    }
    if (train.precision != train::Precision::kAuto) return Status();
    SI_ASSIGN_OR_RETURN(const train::ChosenPrecision chosen,
                        train::choose_precision(train, ranks.local_rank(), ranks.local_world()));
    train.precision = chosen.precision;
    if (!chosen.why.empty()) {
      note = fmt::format("precision: {}, because products make {} (train.precision)",
                         base::enum_name(chosen.precision), chosen.why);
    }
    return Status();
  };
  SI_RETURN_IF_ERROR(ranks.all_ok("train.precision", ranks.first() ? choose() : Status()));
  SI_ASSIGN_OR_RETURN(const std::string name,
                      ranks.from_first(std::string(base::enum_name(train.precision))));
  train.precision = *base::enum_from_name<train::Precision>(name);
  loaded.origins["train.precision"] = {config::Origin::Kind::kMachine, 0};
  if (!loaded.origins.contains("optimizer.gradient_type")) {
    loaded.recipe.updater.gradient_type = train::precision_data_type(train.precision);
  }
  return Status();
}

}  // namespace smartinf::apps
