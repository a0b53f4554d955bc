#!/bin/sh
# Starts a run over hosts that know one another's names and share a key, such as the pods of a JobSet:
#   hosts.sh RANK NAME... -- asyncrl-launch CONFIG [--KEY VALUE]
# Each host calls it with its rank in the list of names. Each runs an sshd of its own, as the same ordinary user, which
# admits the shared key alone and proves itself by it. Rank 0 waits until all answer, and launches. At its end it ends
# the others. ASYNCRL_SSH_KEY is a folder with the key, as `ssh-keygen -t ed25519 -N "" -f FOLDER/id` makes it.
set -eu
rank=$1
shift
names=
while [ "$1" != -- ]; do
  names="$names $1"
  shift
done
shift
port=${ASYNCRL_SSH_PORT:-2222}
wait_s=${ASYNCRL_HOSTS_WAIT_S:-600}
own_name=$(echo $names | cut -d' ' -f$((rank + 1)))
sshd=$(PATH=$PATH:/usr/sbin:/sbin command -v sshd) || { echo "hosts.sh: sshd is not installed" >&2; exit 2; }

# The sshd of root wants this folder, which a container may lack.
[ "$(id -u)" != 0 ] || mkdir -p /run/sshd
folder=$(mktemp -d)
sshd_pid=
end() {
  [ -z "$sshd_pid" ] || kill "$sshd_pid" 2>/dev/null || :
  rm -rf "$folder"
}
trap end EXIT
install -m 600 "$ASYNCRL_SSH_KEY/id" "$folder/id"
ssh-keygen -y -f "$folder/id" > "$folder/id.pub"
echo "* $(cat "$folder/id.pub")" > "$folder/known_hosts"
cat > "$folder/sshd_config" <<END
Port $port
ListenAddress $own_name
HostKey $folder/id
AuthorizedKeysFile $folder/id.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
AllowTcpForwarding no
StrictModes no
UsePAM no
PidFile none
SetEnv PATH=$PATH LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}
END
cat > "$folder/config" <<END
Host *
  Port $port
  IdentityFile $folder/id
  IdentitiesOnly yes
  UserKnownHostsFile $folder/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  LogLevel ERROR
END
"$sshd" -D -e -f "$folder/sshd_config" &
sshd_pid=$!

if [ "$rank" != 0 ]; then
  # The head ends this sshd when the run has ended.
  trap 'exit 0' TERM INT
  echo "$sshd_pid" > "$folder/pid"
  wait "$sshd_pid" || :
  exit 0
fi

launch=
trap '[ -z "$launch" ] || kill -TERM "$launch" 2>/dev/null || :' TERM INT
waited=0
for name in $names; do
  until ssh -F "$folder/config" -o BatchMode=yes -o ConnectTimeout=5 "$name" true 2>"$folder/error"; do
    waited=$((waited + 1))
    if [ "$waited" -gt "$wait_s" ]; then
      echo "hosts.sh: $name does not answer: $(tail -n 1 "$folder/error")" >&2
      exit 1
    fi
    sleep 1
  done
  echo "$name" >> "$folder/hosts"
done
"$@" --hosts "$folder/hosts" --ssh-args "-F $folder/config" &
launch=$!
# A signal breaks off the waiting, and not the run, which first writes a checkpoint.
while kill -0 "$launch" 2>/dev/null; do
  wait "$launch" || :
done
code=0
wait "$launch" || code=$?
for name in $names; do
  # The parent of the session's shell is a child of that sshd.
  [ "$name" = "$own_name" ] || ssh -F "$folder/config" -o BatchMode=yes -o ConnectTimeout=5 "$name" \
    'kill $(ps -o ppid= -p $(ps -o ppid= -p $PPID))' || :
done
exit "$code"
