// The environment of a program: `tools`, `text`, `image`, a fixed clock and seeded random numbers. The value is the
// function through which the host runs the program. The program cannot reach that function.
((setupText) => {
  "use strict";
  const setup = JSON.parse(setupText);
  const { stringify, parse } = JSON;
  // Functions on strings as they are now: a program may replace them. Half a surrogate pair is no valid text.
  const cut = Function.prototype.call.bind(String.prototype.slice);
  const repair = Function.prototype.call.bind(String.prototype.toWellFormed);
  const textTools = new Set(setup.text_tools);
  const waiting = new Map();
  let calls = [];
  let callCount = 0;
  let argumentsSize = 0;
  let output = "";
  let isTruncated = false;
  let isDone = false;
  let error = "";

  // Names that differ from run to run, that reach the host, or that a program does not need.
  for (const name of ["console", "setTimeout", "clearTimeout", "__timer_manager", "WeakRef", "FinalizationRegistry",
    "SharedArrayBuffer", "Atomics", "WebAssembly", "Temporal"]) {
    if (!Reflect.deleteProperty(globalThis, name)) globalThis[name] = undefined;
  }

  let state = setup.seed >>> 0;
  Math.random = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };

  const SystemDate = Date;
  const clock = setup.clock_ms;
  const FixedDate = function Date(...parts) {
    if (!new.target) return new SystemDate(clock).toString();
    return Reflect.construct(SystemDate, parts.length ? parts : [clock], new.target);
  };
  FixedDate.prototype = SystemDate.prototype;
  FixedDate.prototype.constructor = FixedDate;
  FixedDate.now = () => clock;
  FixedDate.parse = SystemDate.parse;
  FixedDate.UTC = SystemDate.UTC;
  globalThis.Date = FixedDate;

  const describe = (value) => (typeof value === "string" ? value : (stringify(value) ?? String(value)));

  const write = (piece) => {
    const line = output ? `\n${piece}` : piece;
    const room = setup.output_chars - output.length;
    isTruncated ||= line.length > room;
    output += repair(cut(line, 0, room > 0 ? room : 0));
  };

  globalThis.text = (...values) => write(values.map(describe).join(" "));

  globalThis.image = (source) => {
    const url = typeof source === "string" ? source : (source?.image_url ?? source?.url);
    if (typeof url !== "string" || !/^(https:\/\/|data:image\/)[^\s()]+$/.test(url)) {
      throw new TypeError("image() takes the https or data URL of an image.");
    }
    if (output.length + url.length > setup.output_chars) throw new RangeError("The image is too large.");
    write(`![image](${url})`);
  };

  const call = (name, argument) => {
    const isText = typeof argument === "string" && textTools.has(name);
    const isObject = typeof argument === "object" && argument !== null && !Array.isArray(argument);
    if (!isText && !isObject) {
      throw new TypeError(`tools.${name} takes ${textTools.has(name) ? "a string" : "one object with its arguments"}.`);
    }
    if (callCount >= setup.calls) throw new RangeError(`A program can make at most ${setup.calls} calls.`);
    const text = stringify(argument);
    argumentsSize += text.length;
    if (argumentsSize > setup.arguments_chars) throw new RangeError("The arguments of all calls are too large.");
    return new Promise((resolve, reject) => {
      waiting.set(callCount, { resolve, reject });
      calls.push([callCount, name, text]);
      callCount += 1;
    });
  };

  const functions = Object.create(null);
  for (const name of setup.tools) functions[name] = async (argument = {}) => call(name, argument);
  Object.freeze(functions);
  globalThis.tools = new Proxy(functions, {
    get(target, name) {
      if (typeof name === "symbol" || name === "then" || name === "toJSON" || name in target) return target[name];
      throw new TypeError(`There is no tool named '${name}'. Tools: ${setup.tools.join(", ") || "none"}.`);
    },
  });

  const describeError = (reason) => {
    try {
      if (!(reason instanceof Error)) return `The program threw ${describe(reason)}`;
      const line = /program\.js:(\d+):\d+/.exec(String(reason.stack ?? ""));
      return `${reason.name}: ${reason.message}${line ? ` (line ${line[1] - 2})` : ""}`; // two lines are the function's
    } catch {
      return "The program threw a value that cannot be shown.";
    }
  };

  const fail = (reason) => {
    isDone = true;
    error = repair(cut(describeError(reason), 0, setup.error_chars)) || "The program failed.";
  };

  const start = () => {
    const AsyncFunction = Object.getPrototypeOf(async () => {}).constructor;
    new AsyncFunction(`${setup.code}\n//# sourceURL=program.js`)().then((value) => {
      if (value !== undefined) write(describe(value));
      isDone = true;
    }).catch(fail);
  };

  const settle = (results) => {
    for (const [number, value, isError] of results) {
      const { resolve, reject } = waiting.get(number);
      waiting.delete(number);
      if (isError) reject(new Error(parse(value)));
      else resolve(parse(value));
    }
  };

  // `run` starts the program or passes it results. The state is read by a second call, after all its jobs have run.
  return (action, payload) => {
    if (action === "state") {
      if (!isDone && waiting.size === 0) {
        isDone = true;
        error = "The program waits for a promise that nothing settles.";
      }
      // A program that has ended waits for its calls. One that has failed does not.
      if (isDone && (error || waiting.size === 0)) {
        return stringify({ is_done: true, output, is_truncated: isTruncated, error });
      }
      const made = calls;
      calls = [];
      return stringify({ calls: made });
    }
    try {
      if (action === "start") start();
      else settle(parse(payload));
    } catch (reason) {
      fail(reason);
    }
    return "";
  };
})
