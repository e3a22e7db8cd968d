"""The Lua scripts: each in one slot, and idempotent for one token.

`v` is the value, `l` the lease, `g` the lowest acceptable version, `t` a tag's mark. A lease is the token of its
flight, then a digit, the number of loads that failed before, up to 9, and a `w` if another flight waits; only then is
the end of the load published. A user without the permission to publish can store all the same, because waiting flights
poll. `stores/_envelope.py` has the format of an envelope.

A failed load may leave a back-off marker in place of its lease: a `?`, the number of failures, up to 9, and a text.
It lasts for a minute longer than the pause that it asks for, so that failures are counted on after the pause.

For a second there may be a `!` in place of a lease. It means that a load has ended for which other flights waited,
and that its value was not stored. The next load's value would most likely not be stored either, so flights that ask
meanwhile load concurrently, and store nothing. One second is four times the longest polling pause.
"""

from hashlib import sha1
from typing import Any, NamedTuple


class Script(NamedTuple):
    """A script, and the digest that stands for it on a server that knows it."""

    text: str
    digest: str


class Call(NamedTuple):
    """The type of the reply, a script, its keys, all of one slot, and its arguments."""

    kind: Any
    script: Script
    keys: tuple[str, ...]
    args: tuple[Any, ...]

    def by_digest(self) -> tuple[Any, ...]:
        """Return the command for a server that knows the script."""
        return (self.kind, "EVALSHA", self.script.digest, len(self.keys), *self.keys, *self.args)

    def by_text(self) -> tuple[Any, ...]:
        """Return the command for a server that does not."""
        return (self.kind, "EVAL", self.script.text, len(self.keys), *self.keys, *self.args)


def _script(text: str) -> Script:
    text = "\n".join(line.strip() for line in text.strip().splitlines())
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


# KEYS v l, or v alone to read it · ARGV token, lease in ms, last byte to read, value to reject ("" none, "*" any,
# "=" and the token of its flight), the flight's token in a request that was not answered, fingerprint to accept,
# window in ms for which the flight can use a value after its freshness, margin in ms by which it counts as old before
# The reply is HIT, ms until the value expires, and the value; else a kind, and ms until the lease or the pause ends.
# With an old value that the flight can use, or a pause, there follow the value or "", ms until it expires, and a text.
ACQUIRE = _script("""
    local value, found, left = redis.pcall('GETRANGE', KEYS[1], 0, ARGV[3]), '', 0
    if type(value) == 'table' and not string.find(value.err, 'WRONGTYPE', 1, true) then return value end
    if type(value) == 'string' and value ~= '' then
      left = redis.call('PTTL', KEYS[1])
      local values = string.sub(value, 1, 4) == 'SGv4' and string.byte(value, 21)
      if not values or #value < 21 + 67 * values then
        if ARGV[4] == '' then return {'HIT', left, value} end
        values = 0
      end
      for at = 22, 67 * values, 67 do
        if string.sub(value, at, at + 7) == ARGV[6] and '=' .. string.sub(value, at + 32, at + 53) ~= ARGV[4] then
          local lag, stale = struct.unpack('>I8I8', value, at + 8)
          if ARGV[4] ~= '*' and (left < 0 or left - lag > stale + ARGV[8]) then return {'HIT', left, value} end
          if left < 0 or left - lag > math.max(stale - ARGV[7], 0) then found = value end
        end
      end
    end
    local function reply(kind, ends, text)
      if found == '' and not text then return {kind, ends} end
      return {kind, ends, found, left, text}
    end
    if not KEYS[2] then
      if found ~= '' then return reply('ALONE', 0) end
      return redis.error_reply('TRYAGAIN without the value the lease is needed')
    end
    local lease = redis.call('GET', KEYS[2]) or ''
    local holder, rest = string.sub(lease, 1, 22), string.sub(lease, 23)
    local failures, text = string.match(lease, '^%?(%d)(.*)$')
    if ARGV[4] ~= '*' and lease ~= '' and holder ~= ARGV[1] and holder ~= ARGV[5] then
      local ends = redis.call('PTTL', KEYS[2])
      if not failures then
        if #lease == 22 or (#lease == 23 and rest ~= 'w') then redis.call('APPEND', KEYS[2], 'w') end
        return reply(lease == '!' and 'ALONE' or 'WAIT', ends)
      elseif ends > 60000 then
        return reply('BACKOFF', ends - 60000, text)
      end
    end
    if failures then rest = failures end
    if not string.find(rest, '^%d') then rest = '0' .. rest end
    redis.call('SET', KEYS[2], ARGV[1] .. rest, 'PX', ARGV[2])
    return reply('OWN', 0)
""")

# Values with other fingerprints, those of other releases, stay beside the new one: at most three, and only if all
# together are short enough to be read at once. A refresh removes them, because they are older.

# KEYS v l g · ARGV token, envelope of one value, its life with the window in ms, version ("" none), life of g in ms,
# channel, message, 1 for a refresh, bytes of the longest envelope
# A refresh always publishes. It drops a value that it may not replace, because that may be older; a lease was taken
# after its own.
FILL = _script("""
    local lease = redis.call('GET', KEYS[2])
    local there = redis.pcall('GETRANGE', KEYS[1], 0, 288)
    local values = type(there) == 'string' and string.sub(there, 1, 20) == string.sub(ARGV[2], 1, 20)
    values = values and string.byte(there, 21) or 0
    if values > 4 or #there < 21 + 67 * values then values = 0 end
    local mine, others, first = '', {}, 21 + 67 * values
    for at = 22, 67 * values, 67 do
      local entry = string.sub(there, at, at + 66)
      local lag, length = struct.unpack('>I8', entry, 9), struct.unpack('>I4', entry, 64)
      if string.sub(entry, 1, 8) == string.sub(ARGV[2], 22, 29) then
        mine = entry
      else
        others[#others + 1] = {entry = entry, lag = lag, first = first, length = length}
      end
      first = first + length
    end
    if not lease or string.sub(lease, 1, 22) ~= ARGV[1] then
      if string.sub(mine, 33, 54) == ARGV[1] then return 'DUP' end
      if ARGV[8] == '1' then
        redis.call('DEL', KEYS[1])
        redis.pcall('PUBLISH', ARGV[6], ARGV[7])
      end
      return 'REJ'
    end
    redis.call('DEL', KEYS[2])
    local is_awaited = #lease > 22 and string.sub(lease, -1) == 'w'
    if is_awaited or ARGV[8] == '1' then redis.pcall('PUBLISH', ARGV[6], ARGV[7]) end
    if ARGV[4] ~= '' then
      local lowest = tonumber(redis.pcall('GET', KEYS[3])) or 0
      if mine ~= '' then lowest = math.max(lowest, (struct.unpack('>I8', mine, 55))) end
      if tonumber(ARGV[4]) < lowest then
        if ARGV[8] == '1' and redis.call('DEL', KEYS[1]) == 1 then redis.call('SET', KEYS[3], lowest, 'PX', ARGV[5]) end
        if is_awaited then redis.pcall('SET', KEYS[2], '!', 'PX', 1000) end
        return 'OLD'
      end
    end
    local life, value, kept = tonumber(ARGV[3]), ARGV[2], {}
    if ARGV[8] == '1' then others = {} end
    local left = #others > 0 and redis.call('PTTL', KEYS[1]) or 0
    local longest, size = life, #value
    for _, other in ipairs(others) do
      if #kept < 3 and other.lag < left and size + 67 + other.length <= tonumber(ARGV[9]) then
        other.body = redis.call('GETRANGE', KEYS[1], other.first, other.first + other.length - 1)
        if #other.body == other.length then
          kept[#kept + 1] = other
          size = size + 67 + other.length
          longest = math.max(longest, left - other.lag)
        end
      end
    end
    if #kept > 0 then
      local entries = string.sub(value, 22, 29) .. struct.pack('>I8', longest - life) .. string.sub(value, 38, 88)
      local bodies = string.sub(value, 89)
      for _, other in ipairs(kept) do
        local lag = struct.pack('>I8', longest - left + other.lag)
        entries = entries .. string.sub(other.entry, 1, 8) .. lag .. string.sub(other.entry, 17)
        bodies = bodies .. other.body
      end
      value = string.sub(value, 1, 20) .. string.char(1 + #kept) .. entries .. bodies
    end
    redis.call('SET', KEYS[1], value, 'PX', longest)
    return 'OK'
""")

# KEYS l · ARGV token, lease in ms
RENEW = _script("""
    if string.sub(redis.call('GET', KEYS[1]) or '', 1, 22) ~= ARGV[1] then return 0 end
    return redis.call('PEXPIRE', KEYS[1], ARGV[2])
""")

# KEYS l · ARGV token, channel, message, what the load leaves ("" nothing, "!" a value that was not stored, "?" and a
# text a failure), ms of the first pause and of the longest
# The marker of a failure is set without a DEL of the lease, and after a PEXPIRE, as INVALIDATE explains.
RELEASE = _script("""
    local lease = redis.call('GET', KEYS[1]) or ''
    if string.sub(lease, 1, 22) ~= ARGV[1] then return 0 end
    local is_awaited = #lease > 22 and string.sub(lease, -1) == 'w'
    if string.sub(ARGV[4], 1, 1) == '?' then
      local failures = tonumber(string.sub(lease, 23, 23)) or 0
      local life = math.floor(math.min(ARGV[5] * 2 ^ failures, tonumber(ARGV[6]))) + 60000
      redis.call('PEXPIRE', KEYS[1], life)
      redis.call('SET', KEYS[1], '?' .. math.min(failures + 1, 9) .. string.sub(ARGV[4], 2), 'PX', life)
    else
      redis.call('DEL', KEYS[1])
      if is_awaited and ARGV[4] == '!' then redis.pcall('SET', KEYS[1], '!', 'PX', 1000) end
    end
    if is_awaited then redis.pcall('PUBLISH', ARGV[2], ARGV[3]) end
    return 1
""")

# KEYS any of v l g · ARGV lowest version from now on ("" none), life of g in ms, channel, message ("" none), 1 to keep
# the value as a stale one
# A server that is out of memory refuses a script's first SET, but not one after another write. That write must not be
# a DEL of the key: in a slot that migrates to another node, a script may not set a key that is absent.
# A value that is kept has no more left than its window. What it loses of its life it was never stored with, so that its
# age stays what it is. A value without a window goes, as does what is no envelope, or would never expire.
INVALIDATE = _script("""
    local function soften(key)
      local value = redis.pcall('GETRANGE', key, 0, 288)
      local values = type(value) == 'string' and string.sub(value, 1, 4) == 'SGv4' and string.byte(value, 21) or 0
      if values > 4 or #value < 21 + 67 * values then return false end
      local left, longest, first, kept = redis.call('PTTL', key), 0, 21 + 67 * values, {}
      for at = 22, 67 * values, 67 do
        local lag, stale, life = struct.unpack('>I8I8I8', value, at + 8)
        local length = struct.unpack('>I4', value, at + 63)
        local over = math.max(left - lag - stale, 0)
        local entry = {at = at, left = left - lag - over, stale = stale, life = math.max(life - over, 0)}
        if entry.left > 0 then
          entry.body = redis.call('GETRANGE', key, first, first + length - 1)
          longest = math.max(longest, entry.left)
          kept[#kept + 1] = entry
        end
        first = first + length
      end
      if #kept == 0 then return false end
      local entries, bodies = '', ''
      for _, each in ipairs(kept) do
        local lives = struct.pack('>I8I8I8', longest - each.left, each.stale, each.life)
        entries = entries .. string.sub(value, each.at, each.at + 7) .. lives
        entries = entries .. string.sub(value, each.at + 32, each.at + 66)
        bodies = bodies .. each.body
      end
      value = string.sub(value, 1, 20) .. string.char(#kept) .. entries .. bodies
      redis.call('PEXPIRE', key, longest)
      redis.call('SET', key, value, 'PX', longest)
      return true
    end
    local dropped = {}
    for _, key in ipairs(KEYS) do
      local kind = string.sub(key, -2)
      if kind == ':g' then
        if ARGV[1] ~= '' then
          local lowest = tonumber(redis.pcall('GET', key)) or 0
          redis.call('PEXPIRE', key, ARGV[2])
          redis.call('SET', key, math.max(lowest, tonumber(ARGV[1])), 'PX', ARGV[2])
        end
      elseif kind ~= ':v' or ARGV[5] ~= '1' or not soften(key) then
        table.insert(dropped, key)
      end
    end
    if #dropped > 0 then redis.call('DEL', unpack(dropped)) end
    if ARGV[4] ~= '' then redis.call('PUBLISH', ARGV[3], ARGV[4]) end
    return 1
""")

# A mark is made of random bytes and the time: a request that is executed again, long after the first time, must not
# restore an old mark, and with it values that were loaded under that mark. Times are not compared.

# KEYS t · ARGV random bytes for a mark, life in ms
MARK = _script("""
    local mark = redis.call('GET', KEYS[1])
    if not mark then
      mark = string.sub(redis.sha1hex(ARGV[1] .. table.concat(redis.call('TIME'), '.')), 1, 11)
      redis.call('SET', KEYS[1], mark, 'PX', ARGV[2])
    elseif redis.call('PTTL', KEYS[1]) < ARGV[2] / 2 then
      redis.call('PEXPIRE', KEYS[1], ARGV[2])
    end
    return mark
""")

# KEYS t · ARGV random bytes for the new mark, life in ms, channel, message
INVALIDATE_TAG = _script("""
    local mark = string.sub(redis.sha1hex(ARGV[1] .. table.concat(redis.call('TIME'), '.')), 1, 11)
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    redis.call('SET', KEYS[1], mark, 'PX', ARGV[2])
    redis.call('PUBLISH', ARGV[3], ARGV[4])
    return 1
""")
