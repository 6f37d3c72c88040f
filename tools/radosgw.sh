#!/usr/bin/env bash
# A real S3 server for tests and measurements: Ceph's radosgw with one monitor and one OSD that keeps objects in memory.
# It runs from a directory of Debian packages instead of this machine's. Needs root, mmdebstrap and util-linux.
#
#   radosgw.sh create DIR [SUITE]             make DIR once, in a minute or two; SUITE is sid (Ceph 20), or bookworm (Ceph 16)
#                                             where sid cannot be had. Does nothing if DIR is complete.
#   radosgw.sh run DIR [PORT] [MONITOR_PORT]  serve http://127.0.0.1:PORT until this process ends, however it ends
#   radosgw.sh start DIR [PORT] [MONITOR_PORT]  the same in the background
#   radosgw.sh stop DIR                       end all that `start` began with DIR
#
# User: key `test`, secret `testsecret`. PORT defaults to 9008 and MONITOR_PORT to PORT + 1. Several servers may run
# from one DIR, each in its own namespaces: its data is in a private tmpfs, and the kernel ends all its processes with
# the first of them, so that nothing is left to clean up.
set -eu

die() { echo "radosgw.sh: $*" >&2; exit 1; }

# --- create ---------------------------------------------------------------------------------------------------------

create() {
  local dir=$1 suite
  command -v mmdebstrap >/dev/null || die "mmdebstrap is not installed"
  mkdir -p "$(dirname "$dir")"
  exec 9>"$dir.lock"
  flock 9  # two test runs may want it at once
  [ -e "$dir/usr/bin/radosgw" ] && return
  for suite in ${2:-sid bookworm}; do
    rm -rf --one-file-system "$dir.partial"
    if unpack "$suite" "$dir.partial"; then
      rm -rf --one-file-system "$dir"
      mv "$dir.partial" "$dir"
      return
    fi
    echo "radosgw.sh: no packages of $suite" >&2
  done
  rm -rf --one-file-system "$dir.partial"
  die "could not create $dir"
}

unpack() {
  # The mirror's list may be out of date. The packages are signed all the same.
  setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child \
    mmdebstrap --quiet --variant=minbase --include=radosgw,ceph-mon,ceph-osd --aptopt='Acquire::Check-Valid-Until "false"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' "$1" "$2"
}

# --- run: outside the namespaces, then as their first process --------------------------------------------------------

run() {
  local dir=$1
  [ -e "$dir/usr/bin/radosgw" ] || die "$dir has no radosgw; create it first"
  exec unshare --mount --pid --fork --kill-child --mount-proc="$dir/proc" "$0" serve "$@"
}

work=/srv conf=/srv/ceph.conf

serve() {
  local dir=$1 port=${2:-9008} monitor_port=${3:-}
  mount --bind /dev "$dir/dev"
  mount -t tmpfs tmpfs "$dir$work"
  mkdir "$dir$work"/{mon,osd,rgw,log}
  configure "$port" "${monitor_port:-$((port + 1))}" >"$dir$conf"
  trap 'tail -n 3 "$dir$work"/log/* >&2' EXIT
  start_monitor "$dir"
  start_osd "$dir"
  within "$dir" 60 radosgw-admin -c $conf user create --uid=test --display-name=test --access-key=test --secret-key=testsecret
  daemon "$dir" radosgw -n client.admin --keyring $work/keyring
  until answers "$port"; do kill -0 "$!" || die "radosgw ended"; sleep 0.1; done
  trap - EXIT
  echo "http://127.0.0.1:$port test testsecret"
  wait -n  # the first daemon that ends takes the others along
}

within() { timeout "$2" chroot "$1" "${@:3}" >>"$1$work/log/setup" 2>&1; }

daemon() { chroot "$1" "$2" -f -c $conf "${@:3}" >"$1$work/log/$2" 2>&1 & }

answers() { (exec 3<>"/dev/tcp/127.0.0.1/$1" && printf 'GET / HTTP/1.0\r\n\r\n' >&3 && read -r -t 5 <&3) 2>/dev/null; }

configure() {
  cat <<END
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon_host = v2:127.0.0.1:$2
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
keyring = $work/keyring
run_dir = $work
admin_socket =
pid_file =
log_file =
auth_allow_insecure_global_id_reclaim = true
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
paxos_propose_interval = 0.05
paxos_min_wait = 0.01
mon_data_avail_warn = 2
mon_data_avail_crit = 1
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_objectstore = memstore
memstore_device_bytes = 8589934592
osd_class_load_list = *
osd_class_default_list = *
[mon.a]
mon_data = $work/mon
[osd.0]
osd_data = $work/osd
keyring = $work/osd/keyring
[client.admin]
rgw_frontends = beast endpoint=127.0.0.1:$1 tcp_nodelay=1
rgw_data = $work/rgw
rgw_dns_name =
rgw_gc_obj_min_wait = 1
rgw_gc_processor_period = 4
rgw_gc_processor_max_time = 4
END
}

start_monitor() {
  local fsid address
  fsid=$(sed -n 's/^fsid = //p' "$1$conf") address=$(sed -n 's/^mon_host = //p' "$1$conf")
  within "$1" 30 ceph-authtool --create-keyring $work/keyring --gen-key -n mon. --cap mon 'allow *'
  within "$1" 30 ceph-authtool $work/keyring --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
  within "$1" 30 monmaptool --create --fsid "$fsid" --addv a "[$address]" $work/monmap
  within "$1" 30 ceph-mon --mkfs -i a -c $conf --monmap $work/monmap --keyring $work/keyring
  daemon "$1" ceph-mon -i a
}

start_osd() {
  local id key
  id=$(cat /proc/sys/kernel/random/uuid) key=$(chroot "$1" ceph-authtool --gen-print-key)
  echo "{\"cephx_secret\":\"$key\"}" >"$1$work/secret.json"
  within "$1" 60 ceph -c $conf osd new "$id" -i $work/secret.json
  within "$1" 30 ceph-authtool --create-keyring $work/osd/keyring -n osd.0 --add-key "$key"
  within "$1" 60 ceph-osd -i 0 -c $conf --mkfs --osd-uuid "$id"
  daemon "$1" ceph-osd -i 0
}

# --- start and stop, for interactive use -----------------------------------------------------------------------------

start() {
  local dir=$1 log
  log=$(mktemp)
  setsid "$0" run "$@" </dev/null >"$log" 2>&1 &
  echo $! >>"$dir.pids"
  until grep -s '^http://' "$log"; do kill -0 $! 2>/dev/null || die "it did not start: $(cat "$log"; rm "$log")"; sleep 0.2; done
  rm "$log"
}

stop() {
  local pid
  [ -e "$1.pids" ] || return 0
  while read -r pid; do
    grep -qszxF "$1" "/proc/$pid/cmdline" && kill -9 "$pid"
  done <"$1.pids"
  rm "$1.pids"
}

[ $# -ge 2 ] || { sed -n '5,10s/^# *//p' "$0" >&2; exit 2; }
[ "$(id -u)" -eq 0 ] || die "needs root"
case $1 in
create | run | serve | start | stop) verb=$1; shift; dir=$(realpath -m "$1"); shift; "$verb" "$dir" "$@" ;;
*) die "create, run, start or stop, not $1" ;;
esac
