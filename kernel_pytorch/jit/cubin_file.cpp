#include "kernel_pytorch/jit/cubin_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/private_files.h"

namespace kernel_pytorch::jit {
namespace {

constexpr char kMagic[8] = {'K', 'P', 'C', 'U', 'B', 'I', 'N', '\n'};
constexpr uint64_t kLargestFile = uint64_t{1} << 30;
constexpr std::string_view kTemporaryPrefix = ".writing-";

struct Header {
  char magic[8];
  uint32_t format_version;
  uint32_t entry_bytes;
  uint32_t lowered_name_bytes;
  uint32_t reserved;
  uint64_t cubin_bytes;
  char checksum[32];  // hex, of the fields above and everything after the header
};
static_assert(sizeof(Header) == 64);

void write_checksum(const Header& header, std::string_view body, char* checksum) {
  const std::string_view fields(reinterpret_cast<const char*>(&header), offsetof(Header, checksum));
  const std::string text = Fnv128().add(fields).add(body).hex();
  std::memcpy(checksum, text.data(), sizeof(Header::checksum));
}

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int value() const { return value_; }

 private:
  int value_;
};

bool write_all(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

}  // namespace

std::string encode_cubin_file(const CubinFile& file) {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.format_version = kCubinFormatVersion;
  header.entry_bytes = static_cast<uint32_t>(file.entry.size());
  header.lowered_name_bytes = static_cast<uint32_t>(file.lowered_name.size());
  header.cubin_bytes = file.cubin.size();
  std::string bytes(sizeof(Header), '\0');
  bytes.append(file.entry).append(file.lowered_name).append(file.cubin);
  write_checksum(header, std::string_view(bytes).substr(sizeof(Header)), header.checksum);
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

std::optional<CubinFile> decode_cubin_file(std::string_view bytes, std::string& problem) {
  const auto refuse = [&](std::string reason) {
    problem = std::move(reason);
    return std::nullopt;
  };
  if (bytes.size() < sizeof(Header)) return refuse(concat("it has ", bytes.size(), " bytes, too few for a header"));
  Header header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) return refuse("it is no compiled kernel of ours");
  if (header.format_version != kCubinFormatVersion) {
    return refuse(concat("its format is ", header.format_version, ", ours is ", kCubinFormatVersion));
  }
  if (header.reserved != 0 || header.cubin_bytes > kLargestFile) return refuse("its header makes no sense");
  const uint64_t body_bytes = uint64_t{header.entry_bytes} + header.lowered_name_bytes + header.cubin_bytes;
  std::string_view body = bytes.substr(sizeof(Header));
  if (body.size() != body_bytes) {
    return refuse(concat("it holds ", body.size(), " bytes after the header, which promises ", body_bytes));
  }
  char checksum[sizeof(Header::checksum)];
  write_checksum(header, body, checksum);
  if (std::memcmp(checksum, header.checksum, sizeof(checksum)) != 0) return refuse("its checksum is wrong");
  CubinFile file;
  file.entry = body.substr(0, header.entry_bytes);
  file.lowered_name = body.substr(header.entry_bytes, header.lowered_name_bytes);
  file.cubin = body.substr(body_bytes - header.cubin_bytes);
  return file;
}

bool is_temporary_name(std::string_view name) {
  return name.starts_with(kTemporaryPrefix);
}

bool write_file_atomically(const std::string& path, std::string_view bytes, std::string& problem) {
  static std::atomic<uint64_t> counter{0};
  const size_t slash = path.rfind('/');
  const std::string directory = path.substr(0, slash);
  const std::string temporary = concat(directory, "/", kTemporaryPrefix, getpid(), "-", counter.fetch_add(1));
  const auto give_up = [&](const char* what) {
    problem = concat(what, " ", temporary, ": ", std::strerror(errno));
    unlink(temporary.c_str());
    return false;
  };
  {
    const Descriptor file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (file.value() < 0) return give_up("creating");
    if (!write_all(file.value(), bytes)) return give_up("writing");
    if (fsync(file.value()) != 0) return give_up("syncing");
  }
  if (rename(temporary.c_str(), path.c_str()) != 0) return give_up("renaming");
  return true;
}

std::optional<std::string> read_whole_file(const std::string& path, std::string& problem) {
  problem.clear();
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.value() < 0) {
    if (errno != ENOENT && errno != ENOTDIR) problem = std::strerror(errno);
    return std::nullopt;
  }
  struct stat status {};
  if (fstat(file.value(), &status) != 0 || !S_ISREG(status.st_mode) ||
      static_cast<uint64_t>(status.st_size) > kLargestFile) {
    problem = "it is not a file of sensible size";
    return std::nullopt;
  }
  problem = reason_not_private(path, status);
  if (!problem.empty()) return std::nullopt;
  std::string bytes(static_cast<size_t>(status.st_size), '\0');
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = read(file.value(), bytes.data() + done, bytes.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;  // shorter than stat said: the checksum will tell
    done += static_cast<size_t>(got);
  }
  bytes.resize(done);
  return bytes;
}

}  // namespace kernel_pytorch::jit
