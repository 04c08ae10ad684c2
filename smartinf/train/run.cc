#include "smartinf/train/run.h"

#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/log.h"

namespace smartinf::train {

using base::ErrorCode;
using base::Result;
using base::Status;

Result<base::StepNumber> Run::logged_step(const Ranks& ranks) const {
  const base::StepNumber mine = ranks.first() ? train::logged_step(folder.path()) : 0;
  SI_ASSIGN_OR_RETURN(const std::vector<base::StepNumber> all,
                      ranks.all<base::StepNumber>(std::span(&mine, 1)));
  return all.front();
}

// The log is of one run: what is not of it goes to a file of its own, which a message names.
Status Run::keep_history(std::string_view recipe, const RunStart& start, bool has_state,
                         base::StepNumber logged) {
  SI_RETURN_IF_ERROR(folder.keep_recipe(recipe));
  if (has_state) SI_RETURN_IF_ERROR(folder.keep_run_record(record));
  std::string aside;
  if (!start.own_log) {
    SI_ASSIGN_OR_RETURN(aside, folder.set_log_aside());
  }
  SI_ASSIGN_OR_RETURN(const RunFolder::LogCut cut, folder.keep_log_until(step));
  if (start.taken_over) {
    folder.append_log(
        nlohmann::ordered_json{{"step", step}, {"taken_over", record.run}, {"from", start.from}}
            .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    const std::string kept_in = aside.empty() ? cut.kept_in : aside;
    if (!kept_in.empty()) notices.push_back("log: what is not of this run is in " + kept_in);
    return Status();
  }
  // In memory a step is written now and then only.
  if (has_state && !cut.kept_in.empty()) {
    base::log(base::LogLevel::kWarning,
              fmt::format("{} has steps up to {}, but the devices hold step {}: they are an older "
                          "copy, or a drive has lost what it had reported as written. Training "
                          "resumes from step {}; the later lines are now in {}",
                          folder.file(kLogFile), cut.last, step, step, cut.kept_in));
  }
  if (logged < step) {
    base::log(base::LogLevel::kWarning,
              fmt::format(
                  "{} ends at step {}, but the devices hold step {}: the lines between are missing",
                  folder.file(kLogFile), logged, step));
  }
  return Status();
}

Result<StepReport> Run::pass_over(StepReport report, std::string why, const char* advice,
                                  uint32_t skips_max) {
  report.skipped = std::move(why);
  folder.append_log(report.to_json());
  if (++skips_in_a_row <= skips_max) return report;
  return Status(
      ErrorCode::kFailedPrecondition,
      fmt::format("step {}: {}, {} times in a row", report.step, report.skipped, skips_in_a_row),
      advice);
}

}  // namespace smartinf::train
