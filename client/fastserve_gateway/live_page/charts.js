// Rates of the last minute, on a canvas.

const SPAN_S = 60;

// Rates from counters: means over the last second, so that single iterations do not flicker.
export class Rates {
  constructor(names) {
    this.names = names;
    this.samples = [];
    this.points = []; // { time, [name]: a second }
  }

  add(time, counters) {
    const last = this.samples.at(-1);
    if (last && (time < last.time || this.names.some((name) => counters[name] < last[name]))) {
      this.samples = []; // another server
      this.points = [];
    }
    this.samples.push({ time, ...counters });
    while (this.samples.length > 2 && time - this.samples[1].time >= 1) this.samples.shift();
    const first = this.samples[0];
    const elapsed = Math.max(time - first.time, 1e-9);
    const point = { time };
    for (const name of this.names) {
      point[name] = this.samples.length < 2 ? 0 : (counters[name] - first[name]) / elapsed;
    }
    this.points.push(point);
    while (this.points[0].time < time - SPAN_S - 1) this.points.shift();
    return point;
  }
}

// Draws filled curves of rates. `lines`: { name, colour (a CSS variable), sign: 1 up, -1 down }.
export class Chart {
  constructor(canvas, rates, lines, { unit } = {}) {
    this.canvas = canvas;
    this.rates = rates;
    this.lines = lines;
    this.unit = unit;
    this.scale = 0;
    this.mirrored = lines.some((line) => line.sign < 0);
    new ResizeObserver(() => this.resize()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.readColours());
    this.readColours();
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    this.colours = this.lines.map((line) => read(line.colour));
    this.soft = read("--soft");
    this.line = read("--line");
  }

  resize() {
    const ratio = devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.context = this.canvas.getContext("2d");
    this.context.scale(ratio, ratio);
    this.draw();
  }

  draw() {
    const { context, width, height } = this;
    const { points } = this.rates;
    if (!context || !width) return;
    context.clearRect(0, 0, width, height);
    const zero = this.mirrored ? height / 2 : height - 1;
    const room = this.mirrored ? height / 2 - 14 : height - 4;
    let most = 0;
    for (const point of points) for (const { name } of this.lines) most = Math.max(most, point[name]);
    const now = points.length ? points.at(-1).time : 0;
    this.lines.forEach(({ name, sign }, index) => {
      if (points.length < 2 || most === 0) return;
      const x = (time) => width * (1 - (now - time) / SPAN_S);
      const y = (value) => zero - sign * (value / most) * room;
      context.beginPath();
      context.moveTo(x(points[0].time), zero);
      for (const point of points) context.lineTo(x(point.time), y(point[name]));
      context.lineTo(width, zero);
      context.fillStyle = this.colours[index];
      context.globalAlpha = 0.28;
      context.fill();
      context.globalAlpha = 1;
      context.beginPath();
      for (const point of points) context.lineTo(x(point.time), y(point[name]));
      context.strokeStyle = this.colours[index];
      context.lineWidth = 1.5;
      context.stroke();
    });
    if (this.mirrored) {
      context.fillStyle = this.line;
      context.fillRect(0, zero, width, 1);
    }
    if (this.unit && most > 0) {
      context.fillStyle = this.soft;
      context.font = "11px system-ui, sans-serif";
      context.fillText(`peak ${this.unit(most)}`, 2, 10);
    }
  }
}
