package cluster

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

// client calls the API server as its administrator.
type client struct {
	http *http.Client
	url  string
}

func newClient(p *controlPlane) (*client, error) {
	cert, err := tls.X509KeyPair([]byte(p.admin.cert), []byte(p.admin.key))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM([]byte(p.pem))
	transport := &http.Transport{TLSClientConfig: &tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: roots}}
	h := &http.Client{Transport: transport, Timeout: 30 * time.Second}
	return &client{h, "https://" + p.proxy.Addr().String()}, nil
}

// do sends an object, or nil, and decodes the answer into result, unless that is nil.
func (c *client) do(ctx context.Context, method, path string, object, result any) error {
	var body bytes.Buffer
	if object != nil {
		if err := json.NewEncoder(&body).Encode(object); err != nil {
			return err
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, c.url+path, &body)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("call the API server: %w", err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode >= 300 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, data)
	}
	if err == nil && result != nil {
		err = json.Unmarshal(data, result)
	}
	return err
}
