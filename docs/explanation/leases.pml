/*
 * The protocol of leases.md, for the model checker Spin: processes with an L1 each, flights, refreshes, a writer that
 * commits and invalidates, and Redis, where one script is one atomic step. Everything else may happen in any order.
 *
 * A version is stored as its number plus one; 0 is nothing. NP processes have NF flights, one after the other or at once.
 * There are NW writes, and up to NT steps of Redis' clock: each ends a value's freshness, its window, a lease, a pause,
 * or the memory of failures. LOSSY loses messages, FAILOVER restores an earlier state of Redis, STALE_DB lets loaders
 * read the row before the last (then values need VERSIONED).
 *
 *   spin -a -DNF=2 -DNW=2 -DNT=2 leases.pml
 *   gcc -O2 -DSAFETY -DNOFAIR -DVECTORSZ=1024 -DCOLLAPSE -o pan pan.c && ./pan -m200000 -E -w26
 *
 * Each name beside the word FAULT leaves one rule out, and the model finds what goes wrong without it.
 */
#ifndef NF
#define NF 3
#endif
#ifndef NW
#define NW 1
#endif
#ifndef NT
#define NT 1
#endif
#ifndef NP
#define NP 2
#endif
#ifdef FAILOVER
#define CHECK(x) skip  /* what the server has lost is put right by the repetition: it holds in the end */
#else
#define CHECK(x) assert(x)
#endif

byte db = 0;  /* the committed version */

/* Redis */
byte V = 0;      /* the value */
bool F = false;  /* whether it is fresh; else it is within its window */
byte L = 0;      /* the lease: a token */
byte M = 0;      /* in its place, a back-off marker: 1 during the pause, 2 after it */
byte C = 0;      /* the number of failures, in the lease or in the marker, up to 2 */
byte G = 0;      /* the lowest version that is stored */

/* What the rules promise, noted beside them */
byte hard = 0;        /* nothing older is found after the last invalidation */
byte soft = 0;        /* nothing older is fresh after the last invalidation, soft or not */
bool paused = false;  /* a load has failed, and its pause is not over */
byte failures = 0;    /* failures since the last success or invalidation, up to 2 */

byte l1[2], epoch[2];
bool lost[2];
byte pending[2];  /* messages on their way */
byte journal = 0;
byte nf = 0;
bool is_written = false;

inline publish() {
#ifdef LOSSY
  if :: pending[0]++ :: lost[0] = true fi;
  if :: pending[1]++ :: lost[1] = true fi
#else
  pending[0]++; pending[1]++
#endif
}
inline load() {
#ifdef STALE_DB
  if :: d = db + 1 :: db > 0 -> d = db fi
#else
  d = db + 1
#endif
}
inline put(x) { if :: epoch[p] == ep -> l1[p] = x :: else fi }
inline check_redis() { CHECK(V == 0 || V >= hard); CHECK(!F || V >= soft) }
inline forget_failures() { C = 0; failures = 0; paused = false }

inline release() {  /* RELEASE of a load that has failed */
  atomic {
    if
#ifdef RELEASE_WITHOUT_TOKEN  /* FAULT: a release that is repeated ends what is there by then */
    :: true ->
#else
    :: L == tok ->
#endif
       if :: L == tok -> paused = true; failures = (failures < 2 -> failures + 1 : 2) :: else fi;
       L = 0; M = 1; C = (C < 2 -> C + 1 : 2);
       CHECK(C == failures)
    :: else
    fi
  }
}

inline fill() {  /* FILL */
  atomic {
    if
#ifdef NO_TOKEN  /* FAULT: a fill needs no lease */
    :: true -> V = d; F = true; L = 0; acc = 2
#else
    :: L == tok ->
       L = 0; forget_failures();
#ifdef VERSIONED
       if
       :: d >= G && d >= V -> V = d; F = true; acc = 2
       :: else -> acc = 3; if :: refresh -> V = 0; F = false; publish() :: else fi
       fi
#else
       V = d; F = true; acc = 2
#endif
    :: L != tok -> acc = 3;
#ifdef REFUSED_FILL_CLEARS  /* FAULT: a refused fill deletes the marker of another flight's failure */
       M = 0; C = 0;
#endif
       if :: refresh -> V = 0; F = false; publish() :: else fi
#endif
    fi;
    if :: refresh && acc == 2 -> publish() :: else fi;
    check_redis()
  }
}

proctype Flight(byte p; byte id) {
  byte ep, v, tok, d, acc;
  bool refresh;
  atomic {
    if :: refresh = true :: refresh = false fi;
    ep = epoch[p];
    if :: !refresh && l1[p] != 0 -> goto done :: else fi
  };
  atomic {  /* ACQUIRE, or a plain read that finds a fresh value; the reply comes later */
    if
    :: !refresh && F -> v = V; acc = 1
    :: !refresh && !F && L != 0 -> v = V; acc = 4
#ifdef PAUSE_IGNORED  /* FAULT: the marker does not keep flights from loading */
    :: false ->
#else
    :: !refresh && !F && L == 0 && M == 1 ->
#endif
       CHECK(paused); v = V; acc = 5
    :: else ->
       CHECK(refresh || !paused); paused = false;
#ifdef GRANT_DROPS_COUNT  /* FAULT: the lease does not carry the number of failures on */
       C = 0;
#endif
       M = 0;
#ifdef SHARED_TOKEN  /* FAULT: a process has one token */
       tok = p + 1;
#else
       tok = id + 1;
#endif
       v = (refresh -> 0 : V); L = tok; acc = 2
    fi
  };
  atomic {
#ifdef OLD_IN_L1  /* FAULT: L1 keeps an old value like a fresh one */
    if :: acc != 1 && v != 0 -> put(v) :: else fi;
#endif
    if
    :: acc == 1 ->
#ifdef NO_EPOCH  /* FAULT: L1 stores what was read before an invalidation */
       l1[p] = v;
#else
       put(v);
#endif
       goto done
    :: acc == 4 || (acc == 5 && v != 0) ->  /* the old value is the answer, without a lease; or the flight waits */
       goto done
    :: acc == 5 && v == 0 -> load()  /* without a lease */
    :: acc == 2 -> goto fail         /* the load fails */
    :: acc == 2 -> load()
    fi;
    v = 0
  };
  if
  :: acc == 5 ->
#if !defined(STALE_DB) || defined(UNCOMPARED_IN_L1)  /* FAULT: L1 keeps a version that was compared with none */
     atomic { put(d) };
#endif
#ifdef FILL_WITHOUT_LEASE  /* FAULT: L2 keeps what was loaded without a lease */
     atomic { V = d; F = true; check_redis() };
#endif
     goto done
  :: else
  fi;
  fill();
  atomic {
    if
#ifdef L1_ON_REJECT  /* FAULT: L1 keeps what L2 has refused */
    :: true -> l1[p] = d
#else
    :: acc == 2 && epoch[p] == ep -> l1[p] = d
#endif
    :: else -> if :: refresh -> l1[p] = 0 :: else fi
    fi;
    if :: refresh -> epoch[p]++ :: else fi;
    goto done
  };
fail:
  release();
  release();  /* the request may be executed again, at any time */
done: atomic { v = 0; d = 0; ep = 0; tok = 0; acc = 0; nf++ }
}

inline invalidate(is_soft) {  /* INVALIDATE */
  if
  :: is_soft ->
#ifndef SOFT_KEEPS_FRESH  /* FAULT: the value stays fresh */
     F = false;
#endif
#ifndef SOFT_KEEPS_LEASE  /* FAULT: the load under way may store */
     L = 0;
#endif
#ifndef SOFT_KEEPS_MARKER  /* FAULT: flights pause for a failure from before the change */
     M = 0;
#endif
     C = (M == 0 -> 0 : C)
  :: !is_soft ->
     V = 0; F = false; M = 0;
#ifndef KEEP_LEASE  /* FAULT: likewise */
     L = 0;
#endif
     C = 0
  fi;
  failures = 0; paused = false;
#ifdef VERSIONED
  G = db + 1;
#endif
  publish()
}

proctype Writer() {
  byte k = 0;
  bool is_soft;
  do
  :: k < NW ->
     if :: is_soft = true :: is_soft = false fi;
#ifdef INVAL_BEFORE_COMMIT  /* FAULT: the invalidation comes before the commit */
     atomic { invalidate(is_soft) };
     db++;
#else
     db++;
     atomic {
       invalidate(is_soft);
       soft = db + 1; hard = (is_soft -> hard : db + 1);
       journal = (is_soft && journal < 2 -> 1 : 2);
       check_redis()
     };
#endif
     k++
  :: k == NW -> is_written = true; break
  od
}

proctype Handler(byte p) {  /* of the messages on the bus */
  do
  :: atomic { pending[p] > 0 -> pending[p]--; epoch[p]++; l1[p] = 0 }
  od
}

proctype Clock() {  /* what Redis lets expire, at any time */
  byte k = 0;
  do
  :: k < NT ->
     atomic {
       if
       :: F -> F = false
       :: V != 0 && !F -> V = 0
       :: L != 0 -> L = 0; forget_failures()
       :: M == 1 -> paused = false;
#ifdef MARKER_ENDS_WITH_PAUSE  /* FAULT: failures are not remembered */
          M = 0; C = 0
#else
          M = 2
#endif
       :: M == 2 -> M = 0; forget_failures()
       fi;
       k++
     }
  :: true -> break
  od
}

#ifdef FAILOVER
proctype Failover() {  /* a replica's copy of any moment takes over at any later one */
  byte Vr, Lr, Mr, Cr, Gr;
  bool Fr;
  atomic { Vr = V; Fr = F; Lr = L; Mr = M; Cr = C; Gr = G };
  atomic { V = Vr; F = Fr; L = Lr; M = Mr; C = Cr; G = Gr };
#ifndef NO_REPLAY  /* FAULT: invalidations are not repeated */
  is_written;
  atomic {
    if
    :: journal == 2 -> V = 0; F = false
    :: journal == 1 -> F = false
    :: else
    fi;
    L = 0; M = 0; C = 0;
#ifdef VERSIONED
    G = db + 1;
#endif
    publish()
  }
#endif
}
#endif

#ifdef LOSSY
proctype Reconnect() {  /* a process that has lost a message learns of it, and empties its L1 */
#ifdef NO_FLUSH  /* FAULT: it does not */
  skip
#else
  is_written && nf == NF;
  atomic {
    if :: lost[0] -> epoch[0]++; l1[0] = 0 :: else fi;
    if :: lost[1] -> epoch[1]++; l1[1] = 0 :: else fi
  }
#endif
}
#endif

init {
  atomic {
    byte i = 0;
    do :: i < NF -> run Flight(i % NP, i); i++ :: else -> break od;
    run Writer(); run Handler(0); run Handler(1); run Clock();
#ifdef FAILOVER
    run Failover();
#endif
#ifdef LOSSY
    run Reconnect();
#endif
    i = 0
  };
  timeout;  /* all is quiet */
  assert(V == 0 || V >= hard);
  assert(!F || V == db + 1);
  assert(l1[0] == 0 || l1[0] == db + 1);
  assert(l1[1] == 0 || l1[1] == db + 1)
}
