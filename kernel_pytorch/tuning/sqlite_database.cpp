#include "kernel_pytorch/tuning/sqlite_database.h"

#include <sqlite3.h>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::tuning {
namespace {

[[noreturn]] void throw_failure(sqlite3* handle, int code, std::string_view what) {
  throw SqliteFailure(code & 0xff,
                      concat(what, ": ", handle != nullptr ? sqlite3_errmsg(handle) : sqlite3_errstr(code)));
}

// A path inside a "file:" address: everything but letters, digits and a few marks as %XX.
std::string percent_encode(std::string_view path) {
  std::string text;
  for (const unsigned char c : path) {
    const bool is_plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '/' ||
                          c == '-' || c == '_' || c == '.';
    if (is_plain) {
      text.push_back(static_cast<char>(c));
    } else {
      text.push_back('%');
      text.push_back("0123456789ABCDEF"[c >> 4]);
      text.push_back("0123456789ABCDEF"[c & 15]);
    }
  }
  return text;
}

}  // namespace

Database::Database(const std::string& path, OpenMode mode, int busy_milliseconds) {
  int flags = SQLITE_OPEN_FULLMUTEX | SQLITE_OPEN_URI | SQLITE_OPEN_EXRESCODE;
  flags |= mode == OpenMode::kImmutable ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE;
  if (mode == OpenMode::kCreate) flags |= SQLITE_OPEN_CREATE;
  const std::string address = "file:" + percent_encode(path) + (mode == OpenMode::kImmutable ? "?immutable=1" : "");
  const int code = sqlite3_open_v2(address.c_str(), &handle_, flags, nullptr);
  if (code != SQLITE_OK) {
    const std::string message = concat("opening ", path, ": ", sqlite3_errstr(code));
    sqlite3_close_v2(handle_);
    throw SqliteFailure(code & 0xff, message);
  }
  sqlite3_busy_timeout(handle_, busy_milliseconds);
  // The file may be anybody's: nothing in it may run code or act at a distance.
  sqlite3_db_config(handle_, SQLITE_DBCONFIG_DEFENSIVE, 1, nullptr);
  sqlite3_db_config(handle_, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, nullptr);
  sqlite3_db_config(handle_, SQLITE_DBCONFIG_ENABLE_TRIGGER, 0, nullptr);
  sqlite3_db_config(handle_, SQLITE_DBCONFIG_ENABLE_VIEW, 0, nullptr);
}

Database::~Database() {
  sqlite3_close_v2(handle_);
}

void Database::execute(const char* sql) {
  const int code = sqlite3_exec(handle_, sql, nullptr, nullptr, nullptr);
  if (code != SQLITE_OK) throw_failure(handle_, code, sql);
}

std::string Database::query_text(const char* sql) {
  Statement statement(*this, sql);
  std::string text;
  if (statement.step()) statement.read(0, text);
  return text;
}

int64_t Database::query_number(const char* sql) {
  Statement statement(*this, sql);
  double number = 0;
  if (statement.step()) statement.read(0, number);
  return static_cast<int64_t>(number);
}

int64_t Database::changes() const {
  return sqlite3_changes(handle_);
}

Statement::Statement(Database& database, const char* sql) : database_(database) {
  const int code = sqlite3_prepare_v2(database.handle(), sql, -1, &handle_, nullptr);
  if (code != SQLITE_OK) throw_failure(database.handle(), code, sql);
}

Statement::~Statement() {
  sqlite3_finalize(handle_);
}

bool Statement::step() {
  const int code = sqlite3_step(handle_);
  if (code == SQLITE_ROW) return true;
  if (code != SQLITE_DONE) throw_failure(database_.handle(), code, sqlite3_sql(handle_));
  return false;
}

void Statement::reset() {
  sqlite3_reset(handle_);
}

void Statement::bind(int index, std::string_view text) {
  const int code = sqlite3_bind_text(handle_, index, text.data(), static_cast<int>(text.size()), SQLITE_STATIC);
  if (code != SQLITE_OK) throw_failure(database_.handle(), code, "bind");
}

void Statement::bind(int index, double number) {
  const int code = sqlite3_bind_double(handle_, index, number);
  if (code != SQLITE_OK) throw_failure(database_.handle(), code, "bind");
}

bool Statement::read(int column, std::string& text) const {
  if (sqlite3_column_type(handle_, column) != SQLITE_TEXT) return false;
  const auto* bytes = reinterpret_cast<const char*>(sqlite3_column_text(handle_, column));
  if (bytes == nullptr) return false;
  text.assign(bytes, static_cast<size_t>(sqlite3_column_bytes(handle_, column)));
  return true;
}

bool Statement::read(int column, double& number) const {
  const int type = sqlite3_column_type(handle_, column);
  if (type != SQLITE_FLOAT && type != SQLITE_INTEGER) return false;
  number = sqlite3_column_double(handle_, column);
  return true;
}

Transaction::Transaction(Database& database) : database_(database) {
  database.execute("BEGIN IMMEDIATE");
}

Transaction::~Transaction() {
  // A failed COMMIT may already have rolled back; then this says "no transaction", which is what is wanted.
  if (open_) sqlite3_exec(database_.handle(), "ROLLBACK", nullptr, nullptr, nullptr);
}

void Transaction::commit() {
  database_.execute("COMMIT");
  open_ = false;
}

}  // namespace kernel_pytorch::tuning
