// `smartinf serve`: makes this machine's drives and cores devices for other machines.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <memory>
#include <mutex>

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/file.h"
#include "smartinf/base/log.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/serve/certificates/certificates.h"
#include "smartinf/serve/server.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/drive_watch.h"
#include "apps/smartinf/interrupt.h"
#include "apps/smartinf/machine.h"
#include "apps/smartinf/serve_file.h"
#include "apps/smartinf/serve_metrics.h"

namespace smartinf::apps {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

/// Days before its certificate expires from which a server says so when it starts.
constexpr int64_t kSoonDays = 30;

/// Bytes of a message in the log at most, before its control characters are written out.
constexpr size_t kLineBytesMax = 2000;

/// One line of text for each message, of a bounded length, whatever a client has put into it.
std::string one_line(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, kLineBytesMax)) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte == 0x7f ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  if (text.size() > kLineBytesMax) {
    out += fmt::format("... ({} bytes more)", text.size() - kLineBytesMax);
  }
  return out;
}

/// Writes who did what and when to standard error: the log of a server is all that is left of it.
void install_server_log() {
  base::set_log_sink([](base::LogLevel level, std::string_view message) {
    if (level == base::LogLevel::kDebug) return;
    const char* word = level == base::LogLevel::kWarning ? "warning" : "info";
    fmt::print(stderr, "{:%Y-%m-%dT%H:%M:%SZ} {}: {}\n", fmt::gmtime(::time(nullptr)), word,
               one_line(message));
  });
}

/// Fills in what is left to the server to choose, and checks what has to be there before anything
/// is offered.
Status complete(ServeFile& file) {
  const auto count = static_cast<uint32_t>(file.devices.size());
  const MemoryFacts memory = memory_facts();
  const uint64_t usable =
      std::min(memory.available_bytes, memory.cgroup_limit_bytes.value_or(~uint64_t{0})) / 2;
  for (ServeDevice& device : file.devices) {
    std::error_code error;
    if (!std::filesystem::is_directory(device.path, error) &&
        !std::filesystem::is_block_file(device.path, error)) {
      return Status(ErrorCode::kNotFound,
                    fmt::format("device {}: there is no directory or block device", device.name),
                    "Make the directory, or mount the drive, before it is served.",
                    base::ErrorPlace{device.path, {}, {}, 0});
    }
    if (::access(device.path.c_str(), R_OK | W_OK) != 0) {
      return base::errno_status(errno, fmt::format("device {} cannot be used", device.name),
                                device.path, {}, {}, "Give it to the user that runs the server.");
    }
    if (device.threads == 0) device.threads = std::max(1u, cpu_facts().cores_allowed / count);
    if (device.memory_bytes == 0) device.memory_bytes = usable / count;
  }
  return Status();
}

serve::ServedDevice served(const ServeDevice& device) {
  serve::ServedDevice result;
  result.name = device.name;
  if (std::ranges::find(device.clients, "*") == device.clients.end()) {
    result.clients = device.clients;
  }
  result.memory_bytes = device.memory_bytes;
  result.quota_bytes = device.quota_bytes;
  result.source =
      [device](const csd::SourceWishes& wishes) -> Result<std::unique_ptr<csd::DeviceSource>> {
    engine::UpdaterOptions options;
    engine::DeviceOptions& local = options.devices.emplace_back();
    local.path = device.path;
    local.name = device.name;
    local.threads = device.threads;
    local.bandwidth = device.bandwidth;
    options.gradient_type = wishes.gradient_type;
    options.schedule = wishes.schedule;
    options.durability = wishes.durability;
    options.checksums = wishes.checksums;
    options.pin_threads = false;
    options.io_bytes = device.io_bytes;
    options.io_depth = device.io_depth;
    return std::move(engine::local_sources(options).front());
  };
  return result;
}

/// Warns of files made before by another umask: weights that every user of this machine may read.
void warn_of_open_files(const ServeFile& file) {
  for (const ServeDevice& device : file.devices) {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(device.path, error)) {
      const std::string name = entry.path().filename().string();
      const bool ours = name.starts_with("smartinf.state") || name.starts_with("smartinf.spool") ||
                        name == "smartinf.cache" || name == "smartinf.rows";
      const auto open = std::filesystem::perms::group_all | std::filesystem::perms::others_all;
      if (!ours || !entry.is_regular_file(error) ||
          (entry.status(error).permissions() & open) == std::filesystem::perms::none) {
        continue;
      }
      base::log(
          base::LogLevel::kWarning,
          fmt::format("device {}: other users of this machine can read {}: chmod 600 closes it",
                      device.name, entry.path().string()));
    }
  }
}

/// Appears whole, and others may read it.
Status write_metrics(const std::string& path, const std::string& text) {
  const std::string made = path + ".new";
  SI_RETURN_IF_ERROR(base::write_text_file(made, text, "cannot write the metrics"));
  if (::chmod(made.c_str(), 0644) == 0 && ::rename(made.c_str(), path.c_str()) == 0) {
    return Status();
  }
  return base::errno_status(errno, "cannot write the metrics", path);
}

int run_serve(const std::string& path) {
  if (!serve::wire::has_transport()) {
    return report(Status(ErrorCode::kUnsupported, "this build was made without gRPC",
                         "Install libgrpc++-dev and libssl-dev (Debian, Ubuntu) and build again."));
  }
  serve::prepare_to_serve();  // before there are threads
  ::umask(077);               // what clients keep here is for no other user of this machine
  Result<ServeFile> file = read_serve_file(path);
  if (!file.ok()) {
    const bool usage = file.status().code() == ErrorCode::kInvalidArgument;
    return report(file.status(), usage ? kExitUsage : kExitFailed);
  }
  if (const Status status = complete(*file); !status.ok()) return report(status);
  const auto credentials = serve::read_credentials({file->certificate, file->key, file->ca},
                                                   serve::CertificateRole::kServer);
  if (!credentials.ok()) return report(credentials.status());

  const Interrupt interrupt("stopping: steps that are being committed are finished");
  install_server_log();
  const int64_t until_s = credentials->until_s;
  const auto started_s = static_cast<double>(::time(nullptr));
  if (until_s - ::time(nullptr) < kSoonDays * 86400) {
    base::log(base::LogLevel::kWarning,
              fmt::format("the server's certificate expires on {:%Y-%m-%d %H:%M} UTC",
                          fmt::gmtime(until_s)));
  }

  serve::ServerOptions options;
  options.listen.address = file->listen;
  options.listen.certificate = file->certificate;
  options.listen.key = file->key;
  options.listen.ca = file->ca;
  options.listen.keepalive_seconds = file->keepalive_seconds;
  options.lease_seconds = file->lease_seconds;
  std::unique_ptr<serve::RevocationList> revoked;
  if (!file->revoked.empty()) {
    auto read = serve::RevocationList::open(file->revoked, file->ca);
    if (!read.ok()) return report(read.status());
    revoked = std::move(*read);
    options.revoked = [list = revoked.get()](const serve::wire::Peer& peer) {
      return list->is_revoked(peer.certificate);
    };
  }
  warn_of_open_files(*file);
  std::vector<std::string> paths;
  for (const ServeDevice& device : file->devices) {
    options.devices.push_back(served(device));
    paths.push_back(device.path);
  }
  const DriveWatch drives(std::move(paths));
  Result<std::unique_ptr<serve::Server>> server = serve::Server::start(std::move(options));
  if (!server.ok()) return report(server.status());

  const auto metrics_now = [&] {
    if (file->metrics.empty()) return Status();
    return write_metrics(file->metrics,
                         serve::metrics_text(collect_metrics(**server, *file, drives, started_s,
                                                             static_cast<double>(until_s))));
  };
  // A place that cannot be written is an error at the start, and later a line in the log.
  if (const Status status = metrics_now(); !status.ok()) return report(status);

  const std::string host = file->listen.substr(0, file->listen.rfind(':'));
  for (const ServeDevice& device : file->devices) {
    std::printf("device %s: %s, %u threads, %s of memory, for %s\n", device.name.c_str(),
                device.path.c_str(), device.threads,
                base::format_bytes(device.memory_bytes).c_str(),
                fmt::format("{}", fmt::join(device.clients, ", ")).c_str());
  }
  std::printf("serving at %s:%u%s%s\n", host.c_str(), (*server)->port(),
              file->metrics.empty() ? "" : ", metrics in ", file->metrics.c_str());
  std::fflush(stdout);

  std::mutex mutex;
  std::condition_variable_any stopped;
  std::unique_lock hold(mutex);
  bool written = true;
  while (!interrupt.requested()) {
    stopped.wait_for(hold, interrupt.token(), std::chrono::duration<double>(file->metrics_seconds),
                     [] { return false; });
    const Status status = metrics_now();
    if (written && !status.ok()) base::log(base::LogLevel::kWarning, status.to_string());
    written = status.ok();
  }
  // Nobody takes the last numbers for new ones.
  if (!file->metrics.empty()) (void)::unlink(file->metrics.c_str());
  for (const std::string& line : (*server)->stop()) std::printf("%s\n", line.c_str());
  std::printf("stopped\n");
  return kExitDone;
}

}  // namespace

void add_serve(CLI::App& app, Run& run) {
  CLI::App* command =
      app.add_subcommand("serve", "Offer this machine's drives and cores to trainings elsewhere");
  auto path = std::make_shared<std::string>();
  command->add_option("file", *path, "TOML file: what is offered, to whom, and at which address")
      ->required()
      ->type_name("SERVE.toml");
  command->footer(
      "Clients name a device as grpc://HOST:PORT/NAME. They need a certificate of the same "
      "authority\n"
      "(smartinf certificates) whose name the device's list of clients has. Ctrl-C and SIGTERM "
      "stop\n"
      "the server: a step that is being committed is finished, another one is aborted.\n\n"
      "The file, in short (docs/remote.md has all keys):\n"
      "  certificate = \"nas/certificate.pem\"\n"
      "  key = \"nas/key.pem\"\n"
      "  ca = \"nas/ca.pem\"\n"
      "  [[device]]\n"
      "  name = \"fast0\"\n"
      "  path = \"/srv/smartinf/fast0\"\n"
      "  clients = [\"gpu1\"]\n\n"
      "Examples:\n"
      "  smartinf serve serve.toml");
  command->callback([path, &run] { run = [path] { return run_serve(*path); }; });
}

}  // namespace smartinf::apps
