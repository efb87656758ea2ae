package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"gpu-cdi-plugin/test/lib/kubenode"
)

// The cluster's network is a bridge in the namespaces of the control plane. The API server is there, at the address of
// the service "kubernetes" too: so pods reach it without kube-proxy.
const (
	gateway      = "192.0.2.1"
	service      = "10.96.0.1"
	services     = "10.96.0.0/24"
	bridgeScript = `
ip link add nodes type bridge
ip address add 192.0.2.1/24 dev nodes
ip address add 10.96.0.1/32 dev nodes
ip link set nodes up
`
)

// files is the directory of the control plane's files, in its namespaces.
const files = "/var/lib/cluster/"

// controlPlane is etcd and the programs of Kubernetes that are not on nodes.
type controlPlane struct {
	*kubenode.Namespaces
	*authority
	dir, peers string
	admin      credentials
	proxy      net.Listener // on the machine, to the API server
	daemons    map[string]*kubenode.Daemon
}

// startControlPlane starts the programs, which are in the directory peers, and waits until the API server is ready.
func startControlPlane(ctx context.Context, peers string) (*controlPlane, error) {
	dir, err := kubenode.MakeDir()
	if err != nil {
		return nil, err
	}
	p := &controlPlane{dir: dir, peers: peers, daemons: map[string]*kubenode.Daemon{}}
	if err := p.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("start the control plane: %w", err), p.Close())
	}
	return p, nil
}

func (p *controlPlane) start(ctx context.Context) (err error) {
	if p.Namespaces, err = kubenode.NewNamespaces(p.dir, bridgeScript); err != nil {
		return err
	}
	if err := p.serve(ctx); err != nil {
		return err
	}
	if err := p.write(); err != nil {
		return err
	}
	const etcd = "http://127.0.0.1:2379"
	programs := [][]string{
		{
			"etcd", "--data-dir=" + files + "etcd", "--unsafe-no-fsync", "--log-level=warn",
			"--listen-client-urls=" + etcd, "--advertise-client-urls=" + etcd,
		},
		{
			"kube-apiserver", "--etcd-servers=" + etcd, "--secure-port=443", "--advertise-address=" + gateway,
			"--service-cluster-ip-range=" + services, "--authorization-mode=Node,RBAC", "--allow-privileged=true",
			"--kubelet-preferred-address-types=InternalIP",
			"--client-ca-file=" + files + "ca", "--tls-cert-file=" + files + "server.cert",
			"--tls-private-key-file=" + files + "server.key", "--kubelet-client-certificate=" + files + "admin.cert",
			"--kubelet-client-key=" + files + "admin.key", "--service-account-issuer=https://kubernetes.default.svc",
			"--service-account-key-file=" + files + "admin.key",
			"--service-account-signing-key-file=" + files + "admin.key",
		},
		{
			"kube-controller-manager", "--kubeconfig=" + files + "kubeconfig", "--leader-elect=false", "--secure-port=0",
			"--root-ca-file=" + files + "ca", "--service-account-private-key-file=" + files + "admin.key",
		},
		{"kube-scheduler", "--kubeconfig=" + files + "kubeconfig", "--leader-elect=false", "--secure-port=0"},
	}
	for _, args := range programs {
		d := p.NewDaemon(args[0], append([]string{filepath.Join(p.peers, args[0])}, args[1:]...)...)
		p.daemons[args[0]] = d
		if err := p.startDaemon(ctx, args[0]); err != nil {
			return err
		}
	}
	return nil
}

// startDaemon starts a program, for the API server until it is ready.
func (p *controlPlane) startDaemon(ctx context.Context, name string) error {
	d := p.daemons[name]
	if err := d.Start(); err != nil || name != "kube-apiserver" {
		return err
	}
	return d.WithLog(p.awaitAPIServer(ctx, d))
}

// write writes the files of the programs.
func (p *controlPlane) write() (err error) {
	if p.authority, err = newAuthority(); err != nil {
		return err
	}
	server, err := p.issue("kube-apiserver", "", kubenode.Loopback, gateway, service)
	if err != nil {
		return err
	}
	if p.admin, err = p.issue("admin", "system:masters"); err != nil {
		return err
	}
	errs := []error{os.MkdirAll(p.Host(files), 0o755)}
	for name, content := range map[string]string{
		"ca": p.pem, "server.cert": server.cert, "server.key": server.key,
		"admin.cert": p.admin.cert, "admin.key": p.admin.key, "kubeconfig": p.kubeconfig(p.admin, gateway),
	} {
		errs = append(errs, os.WriteFile(p.Host(files+name), []byte(content), 0o600))
	}
	local := p.kubeconfig(p.admin, p.proxy.Addr().String())
	return errors.Join(append(errs, os.WriteFile(filepath.Join(p.dir, "kubeconfig"), []byte(local), 0o600))...)
}

// kubeconfig returns the configuration of a client of the API server at an address, as JSON, which is valid YAML.
func (p *controlPlane) kubeconfig(user credentials, address string) string {
	data, _ := json.MarshalIndent(map[string]any{ // of strings there are no errors
		"apiVersion": "v1", "kind": "Config", "current-context": "test",
		"clusters": []any{map[string]any{"name": "test", "cluster": map[string]any{
			"server": "https://" + address, "certificate-authority-data": []byte(p.pem),
		}}},
		"users": []any{map[string]any{"name": "test", "user": map[string]any{
			"client-certificate-data": []byte(user.cert), "client-key-data": []byte(user.key),
		}}},
		"contexts": []any{map[string]any{"name": "test", "context": map[string]any{"cluster": "test", "user": "test"}}},
	}, "", "  ")
	return string(data)
}

// serve forwards connections to a port of the machine's loopback interface to the API server.
func (p *controlPlane) serve(ctx context.Context) (err error) {
	if p.proxy, err = net.Listen("tcp", net.JoinHostPort(kubenode.Loopback, "0")); err != nil {
		return err
	}
	go func() {
		for {
			conn, err := p.proxy.Accept()
			if err != nil {
				return // it is closed
			}
			go p.forward(context.WithoutCancel(ctx), conn)
		}
	}()
	return nil
}

func (p *controlPlane) forward(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	server, err := p.Dial(ctx, "tcp", net.JoinHostPort(gateway, "443"))
	if err != nil {
		return // the client sees that
	}
	go func() {
		_, _ = io.Copy(server, conn)
		server.Close()
	}()
	_, _ = io.Copy(conn, server)
}

// awaitAPIServer waits until the API server is ready.
func (p *controlPlane) awaitAPIServer(ctx context.Context, d *kubenode.Daemon) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	client, err := newClient(p)
	if err != nil {
		return err
	}
	return kubenode.Wait(ctx, 3*time.Minute, "the API server is ready", func() error {
		if !d.Running() {
			cancel()
			return errors.New("it has ended")
		}
		return client.do(ctx, http.MethodGet, "/readyz", nil, nil)
	})
}

// Close ends the programs and removes their files.
func (p *controlPlane) Close() error {
	var errs []error
	if p.proxy != nil {
		errs = append(errs, p.proxy.Close())
	}
	if p.Namespaces != nil {
		errs = append(errs, p.Namespaces.Close())
	}
	return errors.Join(append(errs, kubenode.RemoveDir(p.dir))...)
}
