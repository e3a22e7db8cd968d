"""The Lua scripts: each in one slot, and idempotent for one token.

`v` is the value, `l` the lease, `g` the lowest acceptable version, `t` a tag's mark. A lease is the token of its
flight, with a `w` behind it if another flight waits; only then is the end of the load published. A user without the
permission to publish can store all the same, because waiting flights poll. `stores/_envelope.py` has the format of an
envelope.

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
# "=" and the token of its flight), the flight's token in a request that was not answered, fingerprint to accept
ACQUIRE = _script("""
    if ARGV[4] ~= '*' then
      local value = redis.pcall('GETRANGE', KEYS[1], 0, ARGV[3])
      if type(value) == 'table' and not string.find(value.err, 'WRONGTYPE', 1, true) then return value end
      if type(value) == 'string' and value ~= '' then
        local left = redis.call('PTTL', KEYS[1])
        local values = string.sub(value, 1, 4) == 'SGv3' and string.byte(value, 21)
        if not values or #value < 21 + 51 * values then
          if ARGV[4] == '' then return {'HIT', left, value} end
          values = 0
        end
        for at = 22, 51 * values, 51 do
          if string.sub(value, at, at + 7) == ARGV[6] then
            local lag = struct.unpack('>I8', string.sub(value, at + 8, at + 15))
            if '=' .. string.sub(value, at + 16, at + 37) ~= ARGV[4] and (left < 0 or lag < left) then
              return {'HIT', left, value}
            end
          end
        end
      end
    end
    if not KEYS[2] then return redis.error_reply('TRYAGAIN without the value the lease is needed') end
    local lease = redis.call('GET', KEYS[2])
    local holder = string.sub(lease or '', 1, 22)
    if lease and ARGV[4] ~= '*' and holder ~= ARGV[1] and holder ~= ARGV[5] then
      if #lease == 22 then redis.call('APPEND', KEYS[2], 'w') end
      return {lease == '!' and 'ALONE' or 'WAIT', redis.call('PTTL', KEYS[2])}
    end
    redis.call('SET', KEYS[2], ARGV[1] .. string.sub(lease or '', 23), 'PX', ARGV[2])
    return {'OWN', 0}
""")

# Values with other fingerprints, those of other releases, stay beside the new one: at most three, and only if all
# together are short enough to be read at once. A refresh removes them, because they are older.

# KEYS v l g · ARGV token, envelope of one value, life in ms, version ("" none), life of g in ms, channel, message,
# 1 for a refresh, bytes of the longest envelope
# A refresh always publishes. It drops a value that it may not replace, because that may be older; a lease was taken
# after its own.
FILL = _script("""
    local lease = redis.call('GET', KEYS[2])
    local there = redis.pcall('GETRANGE', KEYS[1], 0, 224)
    local values = type(there) == 'string' and string.sub(there, 1, 20) == string.sub(ARGV[2], 1, 20)
    values = values and string.byte(there, 21) or 0
    if values > 4 or #there < 21 + 51 * values then values = 0 end
    local mine, others, first = '', {}, 21 + 51 * values
    for at = 22, 51 * values, 51 do
      local entry = string.sub(there, at, at + 50)
      local lag, length = struct.unpack('>I8', entry, 9), struct.unpack('>I4', entry, 48)
      if string.sub(entry, 1, 8) == string.sub(ARGV[2], 22, 29) then
        mine = entry
      else
        others[#others + 1] = {entry = entry, lag = lag, first = first, length = length}
      end
      first = first + length
    end
    if not lease or string.sub(lease, 1, 22) ~= ARGV[1] then
      if string.sub(mine, 17, 38) == ARGV[1] then return 'DUP' end
      if ARGV[8] == '1' then
        redis.call('DEL', KEYS[1])
        redis.pcall('PUBLISH', ARGV[6], ARGV[7])
      end
      return 'REJ'
    end
    redis.call('DEL', KEYS[2])
    if #lease > 22 or ARGV[8] == '1' then redis.pcall('PUBLISH', ARGV[6], ARGV[7]) end
    if ARGV[4] ~= '' then
      local lowest = tonumber(redis.pcall('GET', KEYS[3])) or 0
      if mine ~= '' then lowest = math.max(lowest, (struct.unpack('>I8', mine, 39))) end
      if tonumber(ARGV[4]) < lowest then
        if ARGV[8] == '1' and redis.call('DEL', KEYS[1]) == 1 then redis.call('SET', KEYS[3], lowest, 'PX', ARGV[5]) end
        if #lease > 22 then redis.pcall('SET', KEYS[2], '!', 'PX', 1000) end
        return 'OLD'
      end
    end
    local life, value, kept = tonumber(ARGV[3]), ARGV[2], {}
    if ARGV[8] == '1' then others = {} end
    local left = #others > 0 and redis.call('PTTL', KEYS[1]) or 0
    local longest, size = life, #value
    for _, other in ipairs(others) do
      if #kept < 3 and other.lag < left and size + 51 + other.length <= tonumber(ARGV[9]) then
        other.body = redis.call('GETRANGE', KEYS[1], other.first, other.first + other.length - 1)
        if #other.body == other.length then
          kept[#kept + 1] = other
          size = size + 51 + other.length
          longest = math.max(longest, left - other.lag)
        end
      end
    end
    if #kept > 0 then
      local entries = string.sub(value, 22, 29) .. struct.pack('>I8', longest - life) .. string.sub(value, 38, 72)
      local bodies = string.sub(value, 73)
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

# KEYS l · ARGV token, channel, message, and 1 if there is a value that was not stored
RELEASE = _script("""
    local lease = redis.call('GET', KEYS[1]) or ''
    if string.sub(lease, 1, 22) ~= ARGV[1] then return 0 end
    redis.call('DEL', KEYS[1])
    if #lease > 22 then
      if ARGV[4] then redis.pcall('SET', KEYS[1], '!', 'PX', 1000) end
      redis.pcall('PUBLISH', ARGV[2], ARGV[3])
    end
    return 1
""")

# KEYS any of v l g · ARGV lowest version from now on ("" none), life of g in ms, channel, message ("" none)
# A server that is out of memory refuses a script's first SET, but not one after another write. That write must not be
# a DEL of the key: in a slot that migrates to another node, a script may not set a key that is absent.
INVALIDATE = _script("""
    local dropped = {}
    for _, key in ipairs(KEYS) do
      if string.sub(key, -2) ~= ':g' then
        table.insert(dropped, key)
      elseif ARGV[1] ~= '' then
        local lowest = tonumber(redis.pcall('GET', key)) or 0
        redis.call('PEXPIRE', key, ARGV[2])
        redis.call('SET', key, math.max(lowest, tonumber(ARGV[1])), 'PX', ARGV[2])
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
