#include "apps/smartinf/remote_flags.h"

namespace smartinf::apps {

void add_remote_flags(CLI::App& command, serve::RemoteOptions& remote) {
  const char* group = "Devices of other machines (grpc://HOST:PORT/NAME)";
  const auto file = [&](const char* flag, std::string& path, const char* variable,
                        const char* help) {
    command.add_option(flag, path, help)->envname(variable)->type_name("FILE")->group(group);
  };
  file("--remote-certificate", remote.certificate, "SMARTINF_REMOTE_CERTIFICATE",
       "This client's certificate (PEM)");
  file("--remote-key", remote.key, "SMARTINF_REMOTE_KEY", "This client's private key (PEM)");
  file("--remote-ca", remote.ca, "SMARTINF_REMOTE_CA",
       "Certificate of the authority that signed the servers' certificates (PEM)");
  command
      .add_option("--remote-reconnect", remote.reconnect_seconds,
                  "Seconds for which a lost connection is made again")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--remote-deadline", remote.deadline_seconds,
                  "Seconds that a server which owes an answer may be silent")
      ->check(CLI::Range(1.0, 1e6))
      ->capture_default_str()
      ->group(group);
}

}  // namespace smartinf::apps
