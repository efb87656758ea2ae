package cluster

import (
	"context"
	"log"
	"os"
	"path/filepath"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// shared is the suite of all tests, and running their cluster.
var (
	shared  *suite.Suite
	running *Cluster
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	code := suite.Run(m, &shared)
	if running == nil {
		return code
	}
	if err := running.Close(); err != nil {
		log.Print(err)
		return 1
	}
	return code
}

// start starts the cluster of all tests, which outlives the first of them.
func start(t testing.TB) *Cluster {
	t.Helper()
	if running != nil {
		return running
	}
	testenv.Root(t)
	testenv.Command(t, "cc")
	// What may be missing is searched for before anything is built.
	if _, err := kubenode.Find(shared.NodePeers(t)); err != nil {
		testenv.Skip(t, err.Error())
	}
	for _, name := range []string{"kubelet", "containerd", "etcd", "helm"} {
		shared.NodePeer(t, name)
	}
	p := Programs{Bin: filepath.Dir(shared.Program(t, "gpu-cdi-plugin")), Peers: shared.NodePeers(t)}
	begin := time.Now()
	c, err := Start(context.WithoutCancel(t.Context()), p)
	testenv.Must(t, err)
	t.Logf("the cluster was ready after %.1f s", time.Since(begin).Seconds())
	running = c
	return c
}
