package e2e

import (
	_ "embed"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/guide"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

const leasesGuide = "docs/leases.md"

const (
	// leasing starts a manager with the plugin, and waits for the devices.
	leasing = awaiting + `
device-manager serve --plugin 'gpu-cdi-plugin serve' >/run/manager.log 2>&1 &
expect=Healthy await device-manager node --devices
`
	// held has three of four GPUs leased, and prints which. Whoever leases one gets the fourth.
	held = leasing + `
mkfifo holds
gpu-run 3 -- sh -c 'echo HELD $CUDA_VISIBLE_DEVICES; echo >holds; exec sleep 1000' &
read -r line <holds
`
	// job writes a program that fails if another one has one of its GPUs at the same time. The jobs end when $together
	// of them have run at a time.
	job = `
mkdir held
cat >job.sh <<'END'
#!/bin/sh -e
for uuid in $(echo "$CUDA_VISIBLE_DEVICES" | tr , ' '); do
	mkdir "held/$uuid" || { echo "CLASH: $uuid"; exit 9; }
done
n=0
until [ "$(ls held | wc -l)" -ge "${together:-1}" ] || [ -e met ]; do
	n=$((n + 1))
	[ $n -lt 600 ] || { echo "ALONE"; exit 8; }
	sleep 0.05
done
>met
echo "job $* has $CUDA_VISIBLE_DEVICES" >>log
for uuid in $(echo "$CUDA_VISIBLE_DEVICES" | tr , ' '); do rmdir "held/$uuid"; done
exit ${fails:-0}
END
chmod +x job.sh
`
)

// recipe is how the commands below a heading of the guide are run.
type recipe struct {
	before string // in shell; then recipe runs the commands
	run    string // in shell; recipe by default
	// instead has texts of the commands, and what is run in their place.
	instead map[string]string
	engine  func(t *testing.T, n *sim.Node, script string) proc.Result // behindPodman by default
	status  int
	// check checks what was printed. If it is nil, the output lists one GPU, which nobody else has.
	check func(t *testing.T, n *sim.Node, res proc.Result)
}

var recipes = map[string]recipe{
	"GPUs for people who share a host": { // podman
		before: held, instead: map[string]string{"gpu-run 2 -- sh": "# gpu-run 2 -- sh"},
	},
	"docker": {before: held, engine: behindDocker},
	"runc and crun": {
		before: leasing + `
mkdir -p bundle/rootfs
podman export $(podman create ubuntu) | tar -x -C bundle/rootfs
runc spec --bundle bundle
sed -i 's/"terminal": true/"terminal": false/; s/"sh"/"nvidia-smi", "-L"/' bundle/config.json
mkfifo holds
gpu-run 2 -- sh -c 'echo HELD $CUDA_VISIBLE_DEVICES; echo >holds; exec sleep 1000' &
read -r line <holds
`,
		run:   "recipe; recipe",
		check: func(t *testing.T, n *sim.Node, res proc.Result) { t.Helper(); checkOthers(t, n, res, 2, 2) },
	},
	"Several containers with one lease": {
		before: held,
		run:    "recipe\nexpect=4 await sh -c 'gpu-run --wait 0 1 -- echo 4'",
		check:  func(t *testing.T, n *sim.Node, res proc.Result) { t.Helper(); checkOthers(t, n, res, 1, 2) },
	},
	"A container in the background": {
		before:  held,
		instead: map[string]string{"ubuntu sleep 2h": `ubuntu sh -c "nvidia-smi -L; sleep 2h"`},
		run: `recipe >/dev/null
expect=GPU- await podman logs server
podman logs server
expect=" 1 x .* podman run " await device-manager leases
gpu-run --wait 0 1 -- true || test $? = 124
podman rm --force --time 0 server >/dev/null
gpu-run --wait 10s 1 -- true`,
	},
	"A program or a script": {
		before: leasing + job + "mv job.sh train.sh\n",
		run:    "recipe; cat log",
		check:  func(t *testing.T, n *sim.Node, res proc.Result) { t.Helper(); checkJobs(t, n, res, 1, 2) },
	},
	"make -j with one GPU for each job": {
		before: leasing + job + "cat >Makefile <<'END'\n$makefile\nEND\nexport together=4\n",
		run:    "recipe; cat log",
		check:  func(t *testing.T, n *sim.Node, res proc.Result) { t.Helper(); checkJobs(t, n, res, 8, 1) },
	},
	"cron": {
		before: leasing + job + "mv job.sh nightly.sh\n",
		run:    `env -i HOME="$PWD" LOGNAME=root SHELL=/bin/sh PATH="${0%/*}:/usr/bin:/bin" /bin/sh -c '$crontab'; cat log`,
		check:  func(t *testing.T, n *sim.Node, res proc.Result) { t.Helper(); checkJobs(t, n, res, 1, 1) },
	},
	"A CI job": {
		before:  leasing + job,
		instead: map[string]string{"--wait 30m": "--wait ${wait:-30m}", " 1 --": " ${count:-1} --"},
		run: `
(recipe)
cat log
result() (
	export "$@"
	(recipe) && echo "status 0" || echo "status $?"
)
result fails=3
result count=5
mkfifo holds
gpu-run 4 -- sh -c 'echo >holds; exec sleep 1000' &
read -r line <holds
result wait=0s
kill $!
result wait=1m
`,
		check: func(t *testing.T, n *sim.Node, res proc.Result) {
			t.Helper()
			checkJobs(t, n, res, 1, 1)
			want := "\nstatus 3\nthis host cannot give the GPU\nstatus 125\n" +
				"no GPU was free for 30 minutes: run the job again later\nstatus 124\nstatus 0\n"
			if !strings.HasSuffix(res.Stdout, want) {
				t.Errorf("want %q at the end of %v", want, res)
			}
		},
	},
}

// TestLeaseRecipes runs what the guide to leases says for each kind of command, and compares the GPUs of containers and
// jobs with those that others have.
func TestLeaseRecipes(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	blocks := guide.BlocksByHeading(t, leasesGuide)
	if diff := cmp.Diff(slices.Sorted(maps.Keys(blocks)), slices.Sorted(maps.Keys(recipes))); diff != "" {
		t.Errorf("the recipes of this test are not those of the guide (-guide +test):\n%s", diff)
	}
	for heading, r := range recipes {
		if r.engine == nil {
			t.Run(heading, func(t *testing.T) {
				t.Parallel()
				r.engine = behindPodman
				r.test(t, blocks[heading])
			})
		}
	}
}

// TestSlowTheLeaseRecipeOfDocker does so beside a dockerd that scripts/peers builds.
func TestSlowTheLeaseRecipeOfDocker(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	recipes["docker"].test(t, guide.BlocksByHeading(t, leasesGuide)["docker"])
}

// rootlessLease runs a recipe as an ordinary user.
//
//go:embed testdata/rootless-lease
var rootlessLease string

// TestRootlessLease runs the recipe of podman as an ordinary user of the group that may lease, and then a container in
// the background, whose process has another user ID.
func TestRootlessLease(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	for _, program := range []string{"podman", "newuidmap", "setpriv"} {
		testenv.Command(t, program)
	}
	archive, bin := ubuntu(t, "latest"), filepath.Dir(shared.Program(t, "gpu-run"))
	line, _, _ := strings.Cut(guide.First(t, leasesGuide), "\n")
	runtime := testenv.Command(t, "runc")
	res := proc.Must(t, 0, proc.Cmd{Args: engine.Namespace(t, t.TempDir(), userAccount(t, runtime), engine.V1,
		"bash", "-c", rootlessLease, "rootless", bin, archive, runtime, line)})
	if want := "\nanother: 124\nfree\n1234\n"; !strings.HasSuffix(res.Stdout, want) {
		t.Errorf("want %q at the end, of a user and his container: %v", want, res)
	}
	checkOthers(t, simtest.Node(t, "pcie-quad"), res, 1, 1)
}

// TestAContainerThatOutlivesItsCommand has podman killed, but not its container: nobody else gets the container's GPUs.
func TestAContainerThatOutlivesItsCommand(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	res := behindPodman(t, simtest.Node(t, "pcie-quad"), leasing+`
gpu-run --quiet 3 -- podman run --name server ubuntu sleep 1000 &
expect=true await podman inspect --format '{{.State.Running}}' server
kill -9 $!
wait $! || echo "podman: $?"
sleep 1000 & # await wants a live one
pid=$(podman inspect --format '{{.State.Pid}}' server)
expect="root *$pid *3 x" await device-manager leases
gpu-run --wait 0 2 -- true || echo "another: $?"
podman rm --force --time 0 server
gpu-run --wait 20s 4 -- echo free
podman run -d --name timed $(device-manager lease create --gpus 4 --for 1h -o podman) ubuntu \
	sh -c 'trap "exit 7" TERM; echo ready; while :; do sleep 0.1; done' >/dev/null
expect=ready await podman logs timed
device-manager lease end $(device-manager leases -o name)
podman wait timed
gpu-run --wait 20s 4 -- echo free again
`)
	want := "podman: 137\nanother: 124\nserver\nfree\n7\nfree again\n"
	if res.Code != 0 || !strings.HasSuffix(res.Stdout, want) {
		t.Errorf("want %q at the end of %v", want, res)
	}
}

// TestRuntimesInTheBackground has runtimes return at once when their container starts: the lease goes on with it.
func TestRuntimesInTheBackground(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	res := behindPodman(t, simtest.Node(t, "pcie-quad"), leasing+`
mkdir -p bundle/rootfs
podman export $(podman create ubuntu) | tar -x -C bundle/rootfs
runc spec --bundle bundle
sed -i 's/"terminal": true/"terminal": false/; s/"sh"/"sleep", "1000"/' bundle/config.json
sleep 1000 & # await wants a live one
for n in 1 2 3 4 5; do
	for runtime in runc crun; do
		gpu-run --wait 20s 4 -- $runtime run --detach --bundle bundle c$n </dev/null >/run/$runtime.log 2>&1
		gpu-run --wait 2s 1 -- true || echo "another: $?"
		$runtime kill c$n KILL
		until $runtime delete c$n 2>/dev/null; do sleep 0.1; done
	done
done
gpu-run --wait 20s 4 -- echo free
`)
	want := strings.Repeat("another: 124\n", 10) + "free\n"
	if res.Code != 0 || res.Stdout != want {
		t.Errorf("want %q: %v", want, res)
	}
}

func (r recipe) test(t *testing.T, text string) {
	t.Helper()
	for from, to := range r.instead {
		if !strings.Contains(text, from) {
			t.Errorf("the recipe has no %q, which the test replaces", from)
		}
		text = strings.ReplaceAll(text, from, to)
	}
	run := r.run
	if run == "" {
		run = "recipe"
	}
	script := r.before + "\nrecipe() {\n" + text + "}\n" + run + "\n"
	script = strings.NewReplacer("$makefile", fenced(t, "make"), "$crontab", crontabCommand(t)).Replace(script)
	n := simtest.Node(t, "pcie-quad")
	res := r.engine(t, n, script)
	if res.Code != r.status {
		t.Fatalf("exit status %d, want %d\n%v", res.Code, r.status, res)
	}
	if r.check == nil {
		checkOthers(t, n, res, 1, 1)
		return
	}
	r.check(t, n, res)
}

// fenced returns the block of a language in the guide to leases.
func fenced(t *testing.T, language string) string {
	t.Helper()
	_, block, found := strings.Cut(guide.Read(t, leasesGuide), "\n```"+language+"\n")
	if !found {
		t.Fatalf("the guide has no block of %s", language)
	}
	block, _, _ = strings.Cut(block, "\n```\n")
	return block
}

// crontabCommand returns the command of the guide's line for cron, behind the five fields of the time.
func crontabCommand(t *testing.T) string {
	t.Helper()
	fields := strings.SplitN(fenced(t, "crontab"), " ", 6)
	if len(fields) != 6 || strings.ContainsAny(fields[5], "%'\n") {
		t.Fatalf("cron does not run a line like %q, or this test does not", fields)
	}
	return fields[5]
}

var (
	heldLine = regexp.MustCompile(`(?m)^HELD (\S+)$`)
	jobLine  = regexp.MustCompile(`(?m)^job .*\bhas (\S+)$`)
	listLine = regexp.MustCompile(`(?m)^GPU \d+: .*\(UUID: (\S+)\)$`)
)

// checkOthers checks that each of some containers has listed a number of GPUs, always the same, that nobody else has.
func checkOthers(t *testing.T, n *sim.Node, res proc.Result, count, containers int) {
	t.Helper()
	free := uuidsOfNode(t, n)
	line := heldLine.FindStringSubmatch(res.Stdout)
	if line == nil {
		t.Fatalf("nobody has devices: %v", res)
	}
	for uuid := range strings.SplitSeq(line[1], ",") {
		delete(free, uuid)
	}
	if len(free) != count {
		t.Errorf("%d GPUs are free, want %d: %v", len(free), count, res)
	}
	listed := listLine.FindAllStringSubmatch(res.Stdout, -1)
	for _, l := range listed {
		if !free[l[1]] {
			t.Errorf("a container has %s, which others have: %v", l[1], res)
		}
	}
	if len(listed) != count*containers {
		t.Errorf("%d containers have %d GPUs, want %d each: %v", containers, len(listed), count, res)
	}
}

// checkJobs checks how many jobs have run, how many GPUs each had, and that no two had one at a time.
func checkJobs(t *testing.T, n *sim.Node, res proc.Result, jobs, count int) {
	t.Helper()
	all := uuidsOfNode(t, n)
	lines := jobLine.FindAllStringSubmatch(res.Stdout, -1)
	for _, l := range lines {
		uuids := strings.Split(l[1], ",")
		for _, uuid := range uuids {
			if !all[uuid] {
				t.Errorf("a job has %q: %v", uuid, res)
			}
		}
		if len(uuids) != count {
			t.Errorf("a job has %d GPUs, want %d: %v", len(uuids), count, res)
		}
	}
	if len(lines) != jobs || strings.Contains(res.Stdout, "CLASH") {
		t.Errorf("%d jobs have run, want %d: %v", len(lines), jobs, res)
	}
}

func uuidsOfNode(t *testing.T, n *sim.Node) map[string]bool {
	t.Helper()
	snapshot, err := n.Snapshot()
	testenv.Must(t, err)
	uuids := map[string]bool{}
	for _, d := range snapshot.Devices {
		uuids[d.UUID] = true
	}
	return uuids
}
